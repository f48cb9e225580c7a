// What is shown of one result, step or tree, and of two results; and how both go from round to round.

// ---- by itself or by hand ----

class Player {
  constructor(rounds) {
    this.rounds = rounds;
    this.round = 0;
    this.timer = null;
    this.root = el("div", { class: "root", tabindex: -1, keydown: event => this.key(event) });
  }

  go(round) {
    this.round = clamp(round, [0, this.rounds - 1]);
    this.draw();
  }

  play(on) {
    clearInterval(this.timer);
    this.timer = null;
    if (on) {
      if (this.round === this.rounds - 1) this.go(0);
      this.timer = setInterval(() => {
        if (!this.root.isConnected) return this.play(false);   // the cell was run again
        this.go(this.round + 1);
        if (this.round === this.rounds - 1) this.play(false);
      }, STEP_MS);
    }
    this.root.classList.toggle("playing", on);
    this.scrubber.draw();
  }

  // Arrows go from round to round wherever the focus is, but for sliders, words and nodes, which have their own.
  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (this.rounds < 2 || event.target.matches("input") || modified(event)) return;
    if (event.key in moves) this.go(this.round + moves[event.key]);
    else if (event.key === " " && !event.target.closest("summary, button")) this.play(!this.timer);
    else return;
    taken(event);
  }
}

// ---- one display: which round and which item are shown ----

class Display extends Player {
  constructor(model, lead = null) {
    super(model.steps.length);
    this.model = model;
    this.lead = lead ?? this;   // which goes from round to round: a pair, if the display is a side of it
    this.steps = model.steps.map(data => new Step(data, model.texts));
    this.round = lead ? 0 : model.best;
    this.held = null;   // the item that stays selected when the pointer leaves; null = the round itself
    const result = Boolean(model.prompt), alone = !lead;
    this.answer = result ? new Answer(this) : null;
    this.tree = new Tree(this);
    this.facts = alone ? new Facts(this) : null;
    this.mask = alone ? new Mask(this) : null;
    this.scrubber = alone && this.rounds > 1 ? new Scrubber(this, "step", bars(this)) : null;
    const stage = el("div", { class: alone ? "stage" : "" }, [this.tree, this.facts, this.mask].map(part => part?.element));
    this.root.append(...[
      alone && result && figures(model), alone && result && promptOf(model), this.answer?.element,
      this.scrubber?.element, stage, result && madeBy(model), alone && notes(model),
    ].filter(part => part));
  }

  get step() { return this.steps[this.round]; }

  // What drafts are called and look like.
  name(draft) { return this.model.drafts[draft]; }
  names(authors) { return authors.map(draft => this.name(draft)).join(" and "); }
  shape(draft) { return el("span", { class: this.model.colours[draft] }, this.model.shapes[draft]); }

  // Give an element the colour of one draft, or those of several side by side.
  paint(element, authors) {
    element.classList.add(authors.length ? this.model.colours[authors[0]] : "target");
    if (authors.length > 1) {
      const share = 100 / authors.length;
      const stops = authors.map((draft, i) => `var(--${this.model.colours[draft]}) ${i * share}% ${(i + 1) * share}%`);
      element.classList.add("many");
      element.style.setProperty("--mix", `linear-gradient(90deg, ${stops.join(", ")})`);
    }
    return element;
  }

  go(round) {
    this.tree.expanded.clear();
    super.go(round);
  }

  // Show an item's figures, and light it up with its ancestors; null shows the round's.
  select(item) {
    this.tree.light(item);
    this.mask?.light(item);
    this.facts?.draw(item);
  }

  hold(item) {
    this.held = item;
    this.select(item);
  }

  draw() {
    const focused = this.tree.box.contains(this.root.getRootNode().activeElement);
    this.held = null;
    for (const part of [this.scrubber, this.answer, this.tree, this.mask, this.facts]) part?.draw();
    if (focused) this.root.focus({ preventScroll: true });   // what had it is gone, but keys shall go on working
  }
}

// ---- two results on one text, pass by pass ----

class Pair extends Player {
  constructor(model) {
    super(Math.max(...model.sides.map(side => side.steps.length)));
    this.model = model;
    this.sides = model.sides.map(side => new Display(side, this));
    this.scrubber = new Scrubber(this, "pass", lanes(this));
    this.counts = this.sides.map(() => el("p", { class: "count" }));
    const columns = this.sides.map((side, i) => el("section", { class: "side" },
      el("h2", {}, model.names[i]), this.counts[i], side.root));
    this.root.append(...[
      promptOf(model.sides[0]), this.scrubber.element, el("div", { class: "sides" }, columns), notes(model),
    ].filter(part => part));
    this.root.classList.add("pair");
  }

  draw() {
    this.scrubber.draw();
    this.sides.forEach((side, i) => {
      const left = side.rounds - 1 - this.round, done = sum(side.steps.slice(0, this.round + 1).map(step => step.gained));
      const all = side.model.stats.new_tokens;
      this.counts[i].replaceChildren(el("b", {}, left > 0 ? `${done} of ${all} tokens` : `all ${plural(all, "token")}`),
        left > 0 ? ` after ${plural(this.round + 1, "pass", "passes")}` : ` after ${plural(side.rounds, "pass", "passes")}`);
      side.go(this.round);
    });
  }
}
