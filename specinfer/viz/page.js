// Draws a description (description.py says what is in it) into elements of the page.
//
// Everything that comes from the description reaches the document as text nodes, through `el`: no markup is ever made
// from it.  All names are local, and what is drawn lives in a shadow root: displays on one page are independent.

const USUAL = 48, MOST = [8, 16, 32, USUAL, 64, 128];   // nodes shown of a larger tree: at first, and as one likes
const ROW = 34, TOP = 22, CHARACTER = 7.6;        // of the tree, in pixels
const GAP = 24, LEAST_GAP = 12, PADDING = 14;     // between columns; the same where they are many; around the tree
const LONGEST = 18;                               // characters of a token in a chip
const LEAST_FIT = 0.6, ZOOM = [0.3, 3], FURTHER = 1.25, PAN = 60;   // scales of the tree; pixels a key moves it by
const STEP_MS = 1100;                             // of a round, while playing
const SVG = "http://www.w3.org/2000/svg";

// ---- small tools ----

// An element with attributes (functions become listeners) and children; strings become text nodes.
function el(tag, attributes = {}, ...children) {
  const [, svg, name] = tag.match(/^(svg:)?(.*)$/);
  const made = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.flat(Infinity).filter(child => child || child === 0));
  return made;
}

// How a character that cannot be seen is drawn; undefined for one that can.
function signOf(character) {
  const known = { " ": "␣", "\n": "⏎", "\t": "⇥" }[character];
  if (known || !/[\p{C}\p{Z}]/u.test(character)) return known;
  const code = character.codePointAt(0);
  const [letter, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
  return `\\${letter}${code.toString(16).padStart(digits, "0")}`;
}

// A token's text as it is.  The style draws signs for what cannot be seen, from attributes: they are neither found nor
// copied.  The rest is bytes that end no character, as signs.
function drawn(text, rest = "") {
  const sign = (drawn, part) => {
    const kind = { " ": " space", "\n": " line", "\t": " space" }[part] ?? "";
    return el("span", { class: `unseen${kind}`, "data-sign": drawn }, part);
  };
  const parts = (text.match(/[\p{C}\p{Z}]|[^\p{C}\p{Z}]+/gu) ?? []).map(part => {
    const found = signOf(part);
    return found ? sign(found, part) : part;
  });
  return rest || !text ? [...parts, sign(rest || "∅", "")] : parts;
}

// A token's text with signs, where there is no style to draw them.
const visible = ([text, rest]) => [...text].map(c => signOf(c) ?? c).join("") + rest || "∅";

// Sentences of Python's, whose sign for a space is one that few fonts have.
const prose = text => text.replaceAll("␠", "␣");

// Put text on the clipboard: in frames and on plain http, too, where the newer interface is not to be had.
function copy(text) {
  const put = event => {
    event.clipboardData.setData("text/plain", text);
    taken(event);
  };
  document.addEventListener("copy", put, true);
  const done = document.execCommand("copy");
  document.removeEventListener("copy", put, true);
  return done;
}

function percent(p) {
  if (p === null || p === undefined) return "–";
  const value = 100 * p;
  return value === 0 ? "0 %" : value < 0.1 ? "<0.1 %" : `${value.toFixed(value < 10 ? 1 : 0)} %`;
}

// At most three digits that count, and two after the point.
function number(x) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  return x.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0).replace("-", "−");
}

const plural = (n, word, many = `${word}s`) => `${n} ${n === 1 ? word : many}`;
const clamp = (x, [least, most]) => Math.max(least, Math.min(most, x));
const unique = list => [...new Set(list)];
const sum = list => list.reduce((total, x) => total + x, 0);

function ordinal(n) {
  const ending = n % 100 > 10 && n % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] ?? "th";
  return `${n}${ending}`;
}

function icon(path) {
  return el("svg:svg", { class: "icon", viewBox: "0 0 14 14", "aria-hidden": "true" }, el("svg:path", { d: path }));
}

// An event that was ours: neither the page nor a notebook around it shall act on it, too.
function taken(event) {
  event.preventDefault();
  event.stopPropagation();
}

// Whether a key means something to the browser or the system.
const modified = event => event.altKey || event.ctrlKey || event.metaKey;

// Give one element of a group the focus; it is the group's only tab stop from then on.
function moveFocus(group, element) {
  for (const other of group) other.setAttribute("tabindex", other === element ? 0 : -1);
  element.focus();
}

// ---- what the model's columns mean ----

// A step that knows its tree's shape.
class Step {
  constructor(data, texts) {
    Object.assign(this, data);
    this.size = data.tokens.length;
    this.kids = data.tokens.map(() => []);
    this.depths = [0];
    this.mass = [1];   // probability of the path, under the drafts
    for (let i = 1; i < this.size; i++) {
      const parent = data.parents[i];
      this.kids[parent].push(i);
      this.depths[i] = this.depths[parent] + 1;
      this.mass[i] = this.mass[parent] * (data.q[i] ?? 1);
    }
    this.end = data.path[data.path.length - 1] ?? 0;   // what the bonus token follows
    this.inspected = "p" in data;
    this.text = token => texts[token] ?? String(token);
    this.gained = data.emitted.length;
  }

  // A node's text, and bytes of characters that end in none or in a later one.  The bonus token is the next node.
  pieceOf(node) {
    const [text, rest] = this.split?.[node] ?? [this.text(node < this.size ? this.tokens[node] : this.bonus), ""];
    return [text, rest];
  }

  pieceOfEmitted(k) { return this.pieceOf(this.path[k] ?? this.size); }
  state(node) { return this.states ? this.states[node] : node === 0 ? "root" : "drafted"; }

  // The drafts that proposed a node, or the k-th emitted token: none if it is the target's own.
  authors(node) { return unique(this.draws[node].map(draw => draw[0])); }
  authorsOfEmitted(k) { return k < this.path.length ? this.authors(this.path[k]) : []; }

  // The nodes from the root to a node.
  line(node) { return node > 0 ? [...this.line(this.parents[node]), node] : [0]; }

  // How many nodes are below a node.
  below(node) { return sum(this.kids[node].map(kid => 1 + this.below(kid))); }
}

// The nodes to show: the likeliest paths, and the accepted one.
function likeliest(step, most) {
  const nodes = step.tokens.map((_, node) => node).sort((a, b) => step.mass[b] - step.mass[a] || a - b);
  return new Set([...nodes.slice(0, 1 + most), ...step.path]);
}

// What is drawn of a tree: nodes, the bonus token, and what stands for hidden nodes ("more"), at its first one's line.
// Rows are the lines of the description, without the gaps that hidden nodes leave.
function layout(step, shown, expanded) {
  const items = [], byNode = [];
  const add = (kind, node, parent, line, count = 0) => {
    items.push({ kind, node, parent, line, count, depth: parent ? parent.depth + 1 : 0 });
    return items[items.length - 1];
  };
  for (let node = 0; node < step.size; node++) {
    const parent = byNode[step.parents[node]], line = step.lines[node];
    if (node > 0 && !parent) continue;   // above it, one is hidden
    if (shown.has(node) || expanded.has(parent.node)) {
      byNode[node] = add("node", node, parent, line);
    } else {
      parent.more ??= add("more", parent.node, parent, line);
      parent.more.count += 1 + step.below(node);
    }
  }
  if (step.bonus !== null) add("bonus", step.end, byNode[step.end], step.lines[step.size]);
  let row = 0, above = null;
  for (const item of [...items].sort((a, b) => a.line - b.line)) {
    row += Math.min(1, item.line - (above ?? item).line);
    item.row = row;
    above = item;
  }
  return { items, rows: 1 + row };
}

// ---- what goes from round to round, by itself or by hand ----

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
    this.round = lead ? 0 : this.best();
    this.settings = null;   // the item that stays selected when the pointer leaves; null = the round itself
    const result = Boolean(model.prompt), alone = !lead;
    this.answer = result ? new Answer(this) : null;
    this.tree = new Tree(this);
    this.facts = alone ? new Facts(this) : null;
    this.mask = alone ? new Mask(this) : null;
    this.scrubber = alone && this.rounds > 1 ? new Scrubber(this, "round", bars(this)) : null;
    const stage = el("div", { class: alone ? "stage" : "" }, [this.tree, this.facts, this.mask].map(part => part?.element));
    this.root.append(...[
      alone && result && figures(model), alone && result && promptOf(model), this.answer?.element,
      this.scrubber?.element, stage, alone && result && madeBy(model), alone && notes(model),
    ].filter(part => part));
  }

  // The round that gained most is the one to begin with.
  best() {
    const gains = this.steps.map(step => step.path.length);
    return gains.indexOf(Math.max(...gains));
  }

  get step() { return this.steps[this.round]; }

  // What drafts are called and look like.
  name(draft) { return this.model.drafts[draft]; }
  names(authors) { return authors.map(draft => this.name(draft)).join(" and "); }
  shape(draft) { return el("span", { class: `by${draft % 6}` }, this.model.shapes[draft]); }

  // Give an element the colour of one draft, or those of several side by side.
  paint(element, authors) {
    element.classList.add(authors.length ? `by${authors[0] % 6}` : "target");
    if (authors.length > 1) {
      const share = 100 / authors.length;
      const stops = authors.map((draft, i) => `var(--by${draft % 6}) ${i * share}% ${(i + 1) * share}%`);
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

  lock_settings(item) {
    this.settings = item;
    this.select(item);
  }

  draw() {
    const focused = this.tree.box.contains(this.root.getRootNode().activeElement);
    this.settings = null;
    for (const part of [this.scrubber, this.answer, this.tree, this.mask, this.facts]) part?.draw();
    this.tree.toRoot();
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

function figures({ stats, rule, seed }) {
  const sampling = { coins: "multi-step sampling", coupled: "coupled sampling" }[rule] ?? "sampled";
  const pairs = [
    [String(stats.new_tokens), "tokens"],
    [String(stats.target_passes), "target passes"],
    [number(stats.tokens_per_target_pass), "tokens per pass"],
    [number(stats.tokens_per_second), "tokens/s"],
    [number(stats.seconds.total), "seconds"],
    seed === null ? ["greedy", ""] : [`seed ${seed}`, sampling],
  ];
  const entries = pairs.map(([figure, unit]) => el("div", {}, el("dt", {}, unit), el("dd", {}, figure)));
  return el("dl", { class: "figures" }, entries);
}

function promptOf({ prompt }) {
  return el("details", { class: "prompt", open: "" },
    el("summary", {}, `Prompt, ${plural(prompt.tokens, "token")}`), el("pre", {}, prompt.text));
}

// What made the result: see Result.made_by.
function madeBy({ made_by: made, seed }) {
  if (!Object.keys(made).length) return null;
  const words = pairs => Object.entries(pairs).map(([name, value]) => `${name} ${value}`).join(", ");
  const sampling = seed === null ? "greedy" : [words(made.sampling), `seed ${seed}`].filter(part => part).join(", ");
  return el("section", { class: "made" }, el("h3", {}, "Made by"), list([
    ["target", made.target], ["drafts", made.drafts.join(", ") || "none"], ["tree", made.tree],
    ["verification", made.verifier], ["sampling", sampling], ["arithmetic", `${made.dtype} on ${made.device}`],
    ["versions", words(made.versions)],
  ]));
}

function notes(model) {
  const lines = (model.notes ?? []).map(note => el("li", {}, prose(note)));
  return lines.length ? el("ul", { class: "notes" }, lines) : null;
}

// ---- the answer: prompt, words by who wrote them, and what the lines under them mean ----

class Answer {
  constructor(display) {
    this.display = display;
    this.words = [];
    this.rounds = [];   // of the words
    display.steps.forEach((step, round) => step.emitted.forEach((_, k) => {
      this.words.push(this.word(step.pieceOfEmitted(k), step.authorsOfEmitted(k), round));
      this.rounds.push(round);
    }));
    this.words[0]?.setAttribute("tabindex", 0);
    const label = "the answer, token by token";
    this.element = el("section", { class: "coloured" },
      el("div", { class: "tools" }, this.colours(), this.copyButton()),
      el("div", { class: "answer", role: "group", "aria-label": label }, this.words), this.legend());
  }

  word(piece, authors, round) {
    const by = `by ${authors.length ? this.display.names(authors) : "the target"}, round ${round + 1}`;
    const word = el("span", {
      class: "word", role: "button", tabindex: -1, title: by, "aria-label": `${visible(piece)}, ${by}`,
      click: () => this.display.lead.go(round), keydown: event => this.key(event, word),
    }, drawn(...piece));
    return this.display.paint(word, authors);
  }

  // The switch between text by author and plain text.
  colours() {
    const box = el("input", {
      type: "checkbox", checked: "", change: () => this.element.classList.toggle("coloured", box.checked),
    });
    return el("label", {}, box, "accepted tokens in colour");
  }

  copyButton() {
    const { model } = this.display, words = "Copy text";
    const button = el("button", {
      type: "button", class: "copy", click: () => {
        const text = model.text || model.steps.flatMap(step => step.emitted).join(" ");   // without a tokenizer, ids
        button.textContent = copy(text) ? "Copied" : "Copying is not allowed here";
        setTimeout(() => { button.textContent = words; }, STEP_MS);
      },
    }, words);
    return button;
  }

  legend() {
    const counts = new Map();
    for (const step of this.display.steps) {
      step.emitted.forEach((_, k) => {
        const key = step.authorsOfEmitted(k).join();
        counts.set(key, (counts.get(key) ?? 0) + 1);
      });
    }
    const entries = [...counts].sort((a, b) => b[1] - a[1]).map(([key, count]) => {
      const authors = key ? key.split(",").map(Number) : [];
      const names = authors.map((draft, i) => [i > 0 && " and ", this.display.shape(draft), ` ${this.display.name(draft)}`]);
      const who = el("span", { class: "word" }, authors.length ? names : "the target itself");
      return el("li", {}, this.display.paint(who, authors), ` ${count}`);
    });
    return el("ul", { class: "legend", "aria-label": "who wrote how many tokens" }, entries);
  }

  // Arrows walk along the words; enter goes to a word's round.
  key(event, word) {
    const index = this.words.indexOf(word);
    const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: this.words.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.display.lead.go(this.rounds[index]);
    else if (this.words[to]) moveFocus(this.words, this.words[to]);
    else return;
    taken(event);
  }

  draw() {
    const { round, steps } = this.display;
    this.words.forEach((word, i) => {
      word.classList.toggle("now", this.rounds[i] === round && steps.length > 1);
      word.classList.toggle("later", this.rounds[i] > round);
    });
  }
}

// ---- the scrubber: play, a picture of what each round emitted, and a slider under it ----

// A bar a round, as high as it emitted tokens.
function bars(display) {
  const { steps } = display, last = steps.length - 1;
  const most = Math.max(...steps.map(step => step.gained)), unit = Math.min(8, (46 - most) / most);
  const marks = steps.map((step, round) => el("div", {
    class: "bar", title: `round ${round + 1}: ${plural(step.gained, "token")}`, click: () => display.go(round),
    style: `left: ${100 * round / last}%; width: min(14px, ${(70 / steps.length).toFixed(2)}%)`,
  }, cells(display, step, `height: ${unit}px`)));
  return { picture: el("div", { class: "bars" }, marks), marks: marks.map((mark, round) => [mark, round, true]) };
}

// A lane a side: the text from left to right, a block for each pass that emitted a part of it.
function lanes(pair) {
  const longest = Math.max(...pair.sides.map(side => side.model.stats.new_tokens));
  const marks = [], rows = pair.sides.map((side, i) => {
    const blocks = side.steps.map((step, round) => el("div", {
      class: "block", title: `pass ${round + 1}: ${plural(step.gained, "token")}`, style: `width: ${100 * step.gained / longest}%`,
      click: () => pair.go(round),
    }, cells(side, step, "")));
    marks.push(...blocks.map((block, round) => [block, round, round < side.rounds - 1]));
    const { target_passes, tokens_per_target_pass, tokens_per_second } = side.model.stats;
    const rates = `${number(tokens_per_target_pass)} tokens per pass, ${number(tokens_per_second)} tokens/s`;
    return [
      el("p", {}, el("b", {}, pair.model.names[i]), ` ${target_passes} target passes, ${rates}`),
      el("div", { class: "lane" }, blocks),
    ];
  });
  return { picture: el("div", { class: "lanes" }, rows), marks };
}

function cells(display, step, style) {
  return step.emitted.map((_, k) => display.paint(el("i", { style }), step.authorsOfEmitted(k)));
}

class Scrubber {
  // Args: what is played; the word for a round; a picture, and its marks as [element, round, whether it ends with it].
  constructor(player, word, { picture, marks }) {
    Object.assign(this, { player, word, marks });
    this.slider = el("input", {
      type: "range", min: 0, max: player.rounds - 1, "aria-label": word, input: () => player.go(Number(this.slider.value)),
    });
    this.play = el("button", { type: "button", click: () => player.play(!player.timer) });
    this.where = el("div", { class: "where", "aria-live": "polite" });
    this.element = el("section", { class: "rounds" },
      this.play, this.arrow(`previous ${word}`, -1, "M10 1 3 7l7 6z"), this.arrow(`next ${word}`, 1, "M4 1l7 6-7 6z"),
      el("div", { class: "track" }, picture, this.slider), this.where);
  }

  arrow(label, by, path) {
    const click = () => this.player.go(this.player.round + by);
    return el("button", { type: "button", "aria-label": label, title: label, click }, icon(path));
  }

  draw() {
    const { round, rounds, timer } = this.player, label = timer ? "pause" : "play";
    this.slider.value = round;
    this.slider.setAttribute("aria-valuetext", `${this.word} ${round + 1} of ${rounds}`);
    for (const [mark, at, ends] of this.marks) {
      mark.classList.toggle("now", at === round || (at < round && !ends));   // of a side that is done, the last one
      mark.classList.toggle("later", at > round);
    }
    this.where.replaceChildren(`${this.word} `, el("b", {}, String(round + 1)), ` of ${rounds}`);
    this.play.setAttribute("aria-label", label);
    this.play.setAttribute("title", label);
    this.play.replaceChildren(icon(timer ? "M3 1h3v12H3zM8 1h3v12H8z" : "M3 1l10 6-10 6z"));
  }
}

// ---- the tree: chips and the lines between them ----

class Tree {
  constructor(display) {
    this.display = display;
    this.largest = Math.max(...display.steps.map(step => step.size - 1));
    this.choices = [...MOST.filter(most => most < this.largest), Infinity];
    this.most = this.largest > USUAL ? USUAL : Infinity;   // nodes shown, at most
    this.expanded = new Set();   // nodes whose hidden children are shown all the same
    this.items = [];
    this.scale = null;           // as the reader wants it; null = the tree is as wide as there is room
    this.plane = el("div", { class: "plane" });
    this.box = el("div", { class: "tree", role: "tree", "aria-label": "token tree" }, this.plane);
    this.summary = el("p");
    this.key = el("div", { class: "key" });
    this.scroll = el("div", {
      class: "scroll", tabindex: 0, role: "group", "aria-label": "the tree: arrows move it, + and − zoom, 0 fits it",
      wheel: event => this.wheel(event), pointerdown: event => this.drag(event),
      touchstart: event => this.pinch(event), touchmove: event => this.pinch(event),
    }, this.box);
    this.element = el("section", { class: "panel grown", keydown: event => this.keys(event) },
      el("div", { class: "head" }, this.summary, el("div", { class: "tools" }, this.count(), this.zooms())),
      this.scroll, this.key);
    const lines = Math.max(...display.steps.flatMap(step => step.lines));
    this.highest = TOP + 18 + ROW * (lines + 1);
    new ResizeObserver(() => this.scale ?? this.place()).observe(this.scroll);
  }

  // The slider of how many nodes are shown.
  count() {
    if (this.choices.length < 2) return null;
    const words = () => (this.most < Infinity ? `${this.most} likeliest` : `all ${this.largest}`);
    const output = el("output", {}, words());
    const slider = el("input", {
      type: "range", min: 0, max: this.choices.length - 1, value: this.choices.indexOf(this.most),
      "aria-label": "nodes shown", "aria-valuetext": words(),
      input: () => {
        this.most = this.choices[Number(slider.value)];
        output.textContent = words();
        slider.setAttribute("aria-valuetext", words());
        this.display.go(this.display.round);
      },
    });
    return el("label", {}, "nodes", slider, output);
  }

  zooms() {
    const button = (sign, label, click) => el("button", { type: "button", "aria-label": label, title: label, click }, sign);
    return el("span", { class: "zooms" },
      button("−", "zoom out", () => this.zoom(1 / FURTHER)), button("+", "zoom in", () => this.zoom(FURTHER)),
      button("fit", "fit the width", () => this.fit()));
  }

  draw() {
    const { step } = this.display, { items, rows } = layout(step, likeliest(step, this.most), this.expanded);
    this.items = items;
    const widths = [];
    for (const item of items) {
      this.makeChip(item);
      widths[item.depth] = Math.max(widths[item.depth] ?? 0, item.width);
    }
    const free = (this.scroll.clientWidth || Infinity) - 2 * PADDING - sum(widths);
    const gap = clamp(free / Math.max(1, widths.length - 1), [LEAST_GAP, GAP]);
    const lefts = widths.map((_, depth) => sum(widths.slice(0, depth)) + depth * gap);
    const width = sum(widths) + (widths.length - 1) * gap, height = TOP + rows * ROW;
    const edges = el("svg:svg", { width, height, "aria-hidden": "true" });
    for (const item of items) {
      [item.x, item.y] = [lefts[item.depth], TOP + item.row * ROW];
      Object.assign(item.chip.style, { left: `${item.x}px`, top: `${item.y}px`, width: `${item.width}px` });
      if (item.parent) edges.append(item.edge = this.edge(item));
    }
    const depths = lefts.map((left, depth) =>
      el("span", { class: "depth", style: `left: ${left}px` }, this.depth(depth)));
    this.size = [width, height];
    this.plane.replaceChildren(edges, ...depths, ...items.map(item => item.chip));
    this.place();
    this.summary.replaceChildren(...this.summaryOf(step));
    this.key.replaceChildren(...this.keyOf(step));
  }

  // ---- zoom and pan ----

  get scaled() {
    const room = this.scroll.clientWidth - 2 * PADDING;
    return this.scale ?? (room > 0 ? clamp(room / this.size[0], [LEAST_FIT, 1]) : 1);
  }

  place() {
    if (!this.size) return;   // nothing is drawn yet
    const [width, height] = this.size.map(length => length * this.scaled);
    this.box.style.cssText = `width: ${width}px; height: ${height}px`;
    this.plane.style.transform = `scale(${this.scaled})`;
    this.scroll.style.minHeight = `${Math.min(300, this.highest * this.scaled)}px`;   // so that playing moves little
  }

  // Zoom by a factor.  What is at a place of the window, by default its middle, stays there.
  zoom(factor, x = this.scroll.clientWidth / 2, y = this.scroll.clientHeight / 2) {
    const { scroll } = this, before = this.scaled;
    this.scale = clamp(before * factor, ZOOM);
    this.place();
    const by = this.scale / before;
    scroll.scrollLeft = (scroll.scrollLeft + x - PADDING) * by + PADDING - x;
    scroll.scrollTop = (scroll.scrollTop + y - PADDING) * by + PADDING - y;
  }

  fit() {
    this.scale = null;
    this.place();
    this.toRoot();
  }

  // Bring the root into sight, without moving the page.
  toRoot() {
    this.scroll.scrollLeft = 0;
    this.scroll.scrollTop = (this.items[0].y + ROW / 2) * this.scaled - this.scroll.clientHeight / 2;
  }

  // A place of the page, as a place of the window.
  within(x, y) {
    const { left, top } = this.scroll.getBoundingClientRect();
    return [x - left, y - top];
  }

  // A wheel scrolls; with Ctrl, and as trackpads report a pinch, it zooms.
  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    this.zoom(Math.exp(-event.deltaY / 300), ...this.within(event.clientX, event.clientY));
    taken(event);
  }

  // The mouse drags the tree by what is between the nodes; fingers scroll it anyway.
  drag(event) {
    const { scroll } = this, onBar = event.offsetX > scroll.clientWidth || event.offsetY > scroll.clientHeight;
    if (event.pointerType !== "mouse" || event.button || event.target.closest(".chip")) return;
    if (event.target === scroll && onBar) return;
    const left = scroll.scrollLeft + event.clientX, top = scroll.scrollTop + event.clientY;
    const move = moved => scroll.scrollTo(left - moved.clientX, top - moved.clientY);
    scroll.setPointerCapture(event.pointerId);
    scroll.addEventListener("pointermove", move);
    scroll.addEventListener("lostpointercapture", () => scroll.removeEventListener("pointermove", move), { once: true });
  }

  // Two fingers zoom.
  pinch(event) {
    if (event.touches.length !== 2) return;
    const [a, b] = event.touches, apart = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
    const middle = this.within((a.clientX + b.clientX) / 2, (a.clientY + b.clientY) / 2);
    if (event.type === "touchmove") this.zoom(apart / this.apart, ...middle);
    this.apart = apart;
    taken(event);
  }

  keys(event) {
    if (modified(event)) return;
    const factor = { "+": FURTHER, "=": FURTHER, "-": 1 / FURTHER }[event.key];
    const by = { ArrowLeft: [-PAN, 0], ArrowRight: [PAN, 0], ArrowUp: [0, -PAN], ArrowDown: [0, PAN] }[event.key];
    if (factor) this.zoom(factor);
    else if (event.key === "0") this.fit();
    else if (by && event.target === this.scroll) this.scroll.scrollBy(...by);
    else return;
    taken(event);
  }

  // What stands above a column: the position of its tokens in the text, if that is known.
  depth(depth) {
    const { position } = this.display.step;
    if (position === null) return ["root", "depth 1"][depth] ?? String(depth);
    return depth ? String(position + depth) : `position ${position}`;
  }

  edge({ kind, node, parent, x, y }) {
    const { step } = this.display, state = kind === "node" ? step.state(node) : kind;
    const fromX = parent.x + parent.width, fromY = parent.y + 14, toY = y + 14, half = (x - fromX) / 2;
    const path = el("svg:path", {
      class: `edge ${state}`, d: `M${fromX} ${fromY}C${fromX + half} ${fromY} ${fromX + half} ${toY} ${x} ${toY}`,
      style: `--q: ${(kind === "node" && step.q[node]) || 0}`,
    });
    return this.display.paint(path, kind === "node" ? step.authors(node) : []);
  }

  makeChip(item) {
    const { kind, node } = item, { step, model } = this.display, more = kind === "more", bonus = kind === "bonus";
    const authors = kind === "node" ? step.authors(node) : [], state = kind === "node" ? step.state(node) : kind;
    const number = bonus ? step.size : node, piece = more ? [`+${item.count}`, ""] : step.pieceOf(number);
    const columns = more ? piece[0].length
      : step.split?.[number]?.[2] ?? model.columns[bonus ? step.bonus : step.tokens[node]];
    const mark = model.marks[state], least = more ? 36 : state === "root" ? 78 : 46;
    const words = CHARACTER * Math.min(columns, LONGEST) + (authors.length ? 5 + 8 * authors.length : 0) + (mark ? 16 : 0);
    item.width = Math.max(least, Math.round(16 + words));
    item.chip = el("div", {
      class: `chip ${state}`, "data-node": kind === "node" ? node : kind,
      role: "treeitem", tabindex: state === "root" ? 0 : -1, "aria-level": item.depth + 1,
      "aria-label": this.describe(item, visible(piece), state, authors),
      mouseenter: () => this.display.select(item), mouseleave: () => this.display.select(this.display.settings),
      focus: () => this.display.lock_settings(item), click: () => (more ? this.expand(node) : this.focus(item)),
      keydown: event => this.chipKey(event, item),
    },
      authors.length > 0 && el("span", { class: "who" }, authors.map(draft => this.display.shape(draft))),
      el("span", { class: "text" }, drawn(...piece)),
      mark && el("span", { class: "sign" }, mark),
      kind === "node" && node > 0 && [bar("q", step.q[node]), step.inspected && bar("p", step.p[node])]);
    this.display.paint(item.chip, authors);
  }

  // A chip in words, for those who do not see it.
  describe({ kind, node, count }, text, state, authors) {
    const { step } = this.display;
    if (kind === "more") return `${plural(count, "node")} less likely than those shown: press to show`;
    if (kind === "bonus") return `${text}, the bonus token`;
    if (node === 0) return `${text}, the root`;
    const draft = step.q[node] === null ? "" : `, draft ${percent(step.q[node])}`;
    const target = step.inspected ? `, target ${percent(step.p[node])}` : "";
    return `${text}, ${state}, by ${this.display.names(authors)}${draft}${target}`;
  }

  focus(item) { moveFocus(this.items.map(other => other.chip), item.chip); }

  // Show what one "more" stands for.
  expand(node) {
    this.expanded.add(node);
    this.draw();
    this.focus(this.items.find(item => item.kind === "node" && item.parent?.node === node));
  }

  // Arrows walk from item to item: right to a child, left to the parent, up and down within a column.
  chipKey(event, item) {
    const column = this.items.filter(other => other.depth === item.depth).sort((a, b) => a.row - b.row);
    const index = column.indexOf(item);
    const to = {
      ArrowRight: this.items.find(other => other.parent === item), ArrowLeft: item.parent,
      ArrowUp: column[index - 1], ArrowDown: column[index + 1],
    };
    if (event.key === "Escape") this.display.lock_settings(null);
    else if (item.kind === "more" && (event.key === "Enter" || event.key === " ")) this.expand(item.node);
    else if (!(event.key in to)) return;
    else if (to[event.key]) this.focus(to[event.key]);
    taken(event);
  }

  light(item) {
    const lit = new Set();
    for (let above = item; above; above = above.parent) lit.add(above);
    for (const other of this.items) {
      other.chip.classList.toggle("lit", lit.has(other));
      other.edge?.classList.toggle("lit", lit.has(other));
    }
  }

  // A node's item; of a hidden one, the item that stands for it.
  itemOf(node) {
    const line = this.display.step.line(node).reverse();
    const seen = line.find(above => this.items.some(item => item.kind === "node" && item.node === above));
    const kind = seen === node ? "node" : "more";
    return this.items.find(item => item.kind === kind && item.node === seen);
  }

  summaryOf(step) {
    const size = `${plural(step.size - 1, "node")} in ${plural(Math.max(...step.depths), "level")}`;
    if (!step.states) return [size];
    const bonus = step.bonus === null ? "" : " + bonus token";
    const change = step.change && step.change !== "as decoded" ? [` · ${prose(step.change)}`] : [];
    return [el("b", {}, `${step.path.length} accepted`), `${bonus} · ${size}`, ...change];
  }

  keyOf(step) {
    const bars = ["▁", step.inspected ? "bars: draft q above target p" : "bar: draft q"];
    const entries = [...this.display.model.legend, ...(step.size < 2 ? [] : [bars])];
    return entries.map(([sign, words]) => el("span", {}, el("b", {}, sign), ` ${words}`));
  }
}

// A probability as a line at the foot of a chip; nothing if there is none.
function bar(name, p) {
  return p === null ? null : el("span", { class: `part ${name}` }, el("i", { style: `width: ${100 * p}%` }));
}

// ---- the mask: what each node's token sees ----

class Mask {
  constructor(display) {
    this.display = display;
    this.scroll = el("div", { class: "scroll" });
    this.hidden = el("span");
    const words = "A row is a token of the pass. It sees the prefix and the marked columns: its ancestors and itself.";
    this.element = el("section", { class: "panel mask" },
      el("h3", {}, "Attention mask"), el("p", {}, `${words} `, this.hidden), this.scroll);
  }

  // The nodes that the tree shows, in their order.
  draw() {
    const { step, tree } = this.display;
    const shown = tree.items.filter(item => item.kind === "node").map(item => item.node).sort((a, b) => a - b);
    const n = shown.length, cell = n <= 64 ? 12 : 5, label = cell > 6 ? 80 : 0;   // pixels; labels need 12 of them
    const prefix = 44, left = label + prefix + 4, top = 14, column = new Map(shown.map((node, i) => [node, i]));
    this.rows = new Map(shown.map((node, i) =>
      [node, this.row(node, { cell, label, prefix, left, column, y: top + i * cell })]));
    this.hidden.textContent = n < step.size ? `${plural(step.size - n, "hidden node")} left out.` : "";
    this.scroll.replaceChildren(el("svg:svg", {
      width: left + n * cell + 2, height: top + n * cell + 2, role: "img",
      "aria-label": `attention mask of ${plural(n, "node")}`,
    }, el("svg:text", { x: label, y: 9 }, "prefix"), el("svg:text", { x: left + 1, y: 9 }, "tree"), [...this.rows.values()]));
  }

  row(node, { cell, label, prefix, left, column, y }) {
    const { display } = this, { step } = display, text = [...visible(step.pieceOf(node))];
    const short = (text.length > 10 ? [...text.slice(0, 9), "…"] : text).join("");
    const rect = (name, x, width) =>
      el("svg:rect", { class: name, x, y: y + 1, width, height: name === "hit" ? cell : cell - 2 });
    const row = el("svg:g", {
      mouseenter: () => display.select(display.tree.itemOf(node)), mouseleave: () => display.select(display.settings),
    },
      label > 0 && el("svg:text", { x: label - 6, y: y + cell - 2, "text-anchor": "end" }, short),
      rect("prefix", label, prefix),
      step.line(node).map(seen => rect("cell", left + column.get(seen) * cell + 1, cell - 2)),
      rect("hit", 0, left + column.size * cell));
    return display.paint(row, step.authors(node));
  }

  light(item) {
    const line = item && item.kind === "node" ? this.display.step.line(item.node) : [];
    this.rows.forEach((row, node) => {   // by node
      row.classList.toggle("lit", node === line[line.length - 1]);
      row.classList.toggle("seen", line.includes(node));
    });
  }
}

// ---- the figures of what is selected ----

class Facts {
  constructor(display) {
    this.display = display;
    this.element = el("div", { class: "panel facts" });
  }

  draw(item = null) {
    const parts = {
      round: () => this.round(), node: () => this.node(item.node),
      bonus: () => this.bonus(), more: () => this.more(item),
    }[item ? item.kind : "round"]();
    this.element.replaceChildren(...parts.filter(part => part));
  }

  round() {
    const { step, steps, round } = this.display, ms = name => `${number(1000 * step.seconds[name])} ms`;
    const [first, last] = [step.position + 1, step.position + step.emitted.length];
    const mono = node => el("span", { class: "mono token" }, drawn(...step.pieceOf(node)));
    const hint = "inspect(decoder, result) adds what the target thought of every node.";
    return [
      el("h2", {}, steps.length > 1 ? `Round ${round + 1}` : "The tree"),
      el("p", {}, "Point at a token, or walk the tree with Tab and the arrow keys."),
      list([
        ["drafted", plural(step.size - 1, "node")],
        step.states && ["accepted", step.path.length ? step.path.map(mono) : "none"],
        step.bonus !== null && ["bonus token", mono(step.size)],
        step.position !== null && (last > first ? ["positions", `${first} to ${last}`] : ["position", String(first)]),
        ...(step.seconds?.total ? [["time", ms("total")], ["target", ms("target")], ["drafts", ms("draft")]] : []),
      ]),
      step.states && !step.inspected && el("p", { class: "hint" }, hint),
    ];
  }

  node(node) {
    const { step, model } = this.display, coupled = model.rule === "coupled", known = step.inspected;
    const drafted = node > 0 ? [
      ["drafted by", this.drawsOf(node)],
      known && ["target p", percent(step.p[node])],
      [coupled ? "draft q, given g" : "draft q", percent(step.q[node])],
      known && !coupled && ["p / q", number(step.ratio?.[node])],
      ["path", percent(step.mass[node])],
      ...(known ? this.chance(node) : []),
    ] : [];
    return [
      title(step.pieceOf(node)),
      el("p", {}, step.why ? prose(step.why[node]) : step.states ? step.state(node) : node ? "drafted" : "the root"),
      list([...drafted, ...this.slots(node), ["token id", String(step.tokens[node])]]),
      ...this.alternatives(node),
    ];
  }

  drawsOf(node) {
    const { step } = this.display;
    return step.authors(node).map(draft => {
      const orders = step.draws[node].filter(draw => draw[0] === draft).map(draw => ordinal(draw[1] + 1));
      const name = this.display.name(draft);
      const order = step.q[node] === null ? "" : `, ${orders.join(" and ")}`;
      return el("div", {}, this.display.shape(draft), ` ${name}${order}`);
    });
  }

  // Noise, margin and coins, whichever decided.
  chance(node) {
    const { step } = this.display, noise = step.noise?.[node] ?? null, margin = step.margin?.[node] ?? null;
    const tests = (step.tests?.[node] ?? []).map(([coin, ratio]) => `${number(coin)} against ${number(ratio)}`);
    return [
      noise !== null && ["noise g", number(noise)],
      noise !== null && step.p[node] > 0 && ["log p + g", number(Math.log(step.p[node]) + noise)],
      margin !== null && ["margin", `${margin > 0 ? "+" : ""}${number(margin)} nats`],
      tests.length > 0 && ["coin", tests.join("; ")],
    ];
  }

  slots(node) {
    const { position, depths } = this.display.step;
    if (position === null) return [];
    const at = position + depths[node], slot = position + node;
    const moves = this.display.step.state(node) === "accepted" && slot !== at;
    return [["position", String(at)], ["cache slot", moves ? `${slot}, then ${at}` : String(slot)]];
  }

  // What the target nearly said after a node.
  alternatives(node) {
    const { step, model } = this.display;
    if (!step.inspected) return [];
    const rows = step.top[node].map(([token, p], rank) => {
      const chosen = rank === 0 && model.rule !== "coins";
      return [
        el("span", { class: `mono${chosen ? " chosen" : ""}` }, chosen ? "→ " : "  ", drawn(step.text(token))),
        el("span", { class: "part" }, el("i", { style: `width: ${100 * p}%` })),
        el("span", { class: "figure" }, percent(p)),
      ];
    });
    const order = model.rule === "coupled" ? "log p + g" : "p";
    return [el("h3", {}, `The target after it, by ${order}`), el("div", { class: "rank" }, rows)];
  }

  bonus() {
    const { step } = this.display, [, p, noise] = step.top?.[step.end].find(([token]) => token === step.bonus) ?? [];
    return [
      title(step.pieceOf(step.size)),
      el("p", {}, "the target's choice after the accepted path; the root of the next tree"),
      list([
        p !== undefined && ["target p", percent(p)],
        noise !== undefined && ["noise g", number(noise)],
        step.position !== null && ["position", String(step.position + step.path.length + 1)],
        ["cache slot", "none yet"],
        ["token id", String(step.bonus)],
      ]),
      ...this.alternatives(step.end),
    ];
  }

  more({ count }) {
    return [
      el("h2", {}, plural(count, "hidden node")),
      el("p", {}, "Their paths are less likely than those shown. Press to show them."),
    ];
  }
}

function title(piece) { return el("h2", { class: "mono" }, drawn(...piece)); }

function list(pairs) {
  return el("dl", {}, pairs.filter(pair => pair).map(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));
}

// ---- light or dark ----

// What the page around says: the notebook's theme, else the colour behind the display, else the system's wish.
function isDark(host) {
  const { body, documentElement: html } = document;
  if (body.dataset.jpThemeLight) return body.dataset.jpThemeLight === "false";
  const said = [body.dataset.vscodeThemeKind, html.getAttribute("theme"), html.dataset.theme, body.className];
  for (const word of said) {
    if (/\bdark\b/.test(word ?? "")) return true;
    if (/\blight\b/.test(word ?? "")) return false;
  }
  for (let above = host.parentElement; above; above = above.parentElement) {
    const colour = getComputedStyle(above).backgroundColor;
    const [r, g, b, a = 1] = colour.startsWith("rgb") ? colour.match(/[\d.]+/g).map(Number) : [0, 0, 0, 0];
    if (a > 0.5) return 0.299 * r + 0.587 * g + 0.114 * b < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function followTheme(host) {
  const update = () => host.setAttribute("data-theme", isDark(host) ? "dark" : "light");
  const watch = new MutationObserver(update);
  update();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  for (const element of [document.documentElement, document.body]) watch.observe(element, { attributes: true });
}

// Draw into an element that stands for the display until then.
function mount(host, style, model) {
  const shown = model.sides ? new Pair(model) : new Display(model);
  host.textContent = "";
  host.attachShadow({ mode: "open" }).append(el("style", {}, style), shown.root);
  shown.draw();
  followTheme(host);
}

// Fill the elements with this id that are empty still; a notebook may show one result twice.
function fillAll(id, style, model) {
  for (const host of document.querySelectorAll(`[id="${id}"]`)) {
    if (host.shadowRoot) continue;
    host.setAttribute("data-lm-suppress-shortcuts", "true");   // to JupyterLab: keys are ours while the focus is inside
    mount(host, style, model);
  }
}
