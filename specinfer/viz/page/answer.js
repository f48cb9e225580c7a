// A result: its figures and prompt, the answer by who wrote it, and what made it.

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
    const by = `by ${authors.length ? this.display.names(authors) : "the target"}, step ${round + 1}`;
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
