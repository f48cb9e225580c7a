// Draws a model (model.py says what is in it) into elements of the page.
//
// Everything that comes from the model reaches the document as text nodes, through `el`: no markup is ever made from
// it.  All names are local, and what is drawn lives in a shadow root, so displays do not meet one another.

const SHAPES = ["●", "▲", "■", "◆", "★", "✚"];   // of drafts, by id
const BY_HAND = "✎";
const MARKS = { accepted: "✓", cut: "✓", rejected: "✗", bonus: "+" };
const LEAST = [0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3];   // thresholds of path probability
const ROW = 34, GAP = 24, TOP = 22, CHAR = 7.6, LONGEST = 18;   // of the tree, in pixels and characters
const LEAST_GAP = 12;   // between columns, where they are many
const STEP_MS = 1100;   // while playing
const SVG = "http://www.w3.org/2000/svg";

// ---- small tools ----

// An element with attributes (functions become listeners) and children; strings become text nodes.
function el(tag, attributes = {}, ...children) {
  const [name, isSvg] = tag.startsWith("svg:") ? [tag.slice(4), true] : [tag, false];
  const made = isSvg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(key, value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter(child => child || child === 0));
  return made;
}

// Text whose signs for white space are drawn faintly.
function spaced(text) {
  const sign = part => el("span", { class: part === "␠" ? "space blank" : "space" }, part);
  return text.split(/([␠⏎⇥])/).filter(part => part).map(part => ("␠⏎⇥".includes(part) ? sign(part) : part));
}

function percent(p) {
  if (p === null || p === undefined) return "–";
  const value = 100 * p;
  return value === 0 ? "0 %" : value < 0.1 ? "<0.1 %" : `${value < 10 ? value.toFixed(1) : value.toFixed(0)} %`;
}

// How many characters wide a text is; Chinese characters and emoji count twice.
function cells(text) {
  return [...text].length + (text.match(/[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60]|\p{Emoji_Presentation}/gu) ?? []).length;
}

const number = (x, digits = 2) => (x === null || x === undefined ? "–" : x.toFixed(digits).replace("-", "−"));
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const ordinal = n => `${n}${["th", "st", "nd", "rd"][n % 100 > 10 && n % 100 < 14 ? 0 : n % 10] ?? "th"}`;
const unique = list => [...new Set(list)];

// ---- what the model's columns mean ----

// A step as an object that knows its shape.
class Step {
  constructor(data, model) {
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
    this.end = data.path.length ? data.path[data.path.length - 1] : 0;
    this.onPath = new Set(data.path);
    this.inspected = "p" in data;
    this.text = token => model.texts[token] ?? String(token);
  }

  // The nodes from the root to a node.
  line(node) {
    const nodes = [node];
    while (nodes[0] > 0) nodes.unshift(this.parents[nodes[0]]);
    return nodes;
  }

  state(node) {
    return this.states ? this.states[node] : node === 0 ? "root" : "drafted";
  }

  // The drafts that proposed a node; of an emitted token, none if it is the target's own.
  authors(node) { return unique(this.draws[node].map(draw => draw[0])); }
  authorsOfEmitted(k) { return k < this.path.length ? this.authors(this.path[k]) : []; }

  // The nodes below a node, itself excluded.
  below(node) { return this.kids[node].reduce((sum, kid) => sum + 1 + this.below(kid), 0); }
}

// Where everything stands: one column a depth, a parent beside its first child, subtrees as close as they fit.
function layout(step, least, expanded) {
  const items = [];

  // Place a subtree from row 0 on; return its item, its items, and the first and last row it takes at each depth.
  function place(node, parent, depth) {
    const item = { kind: "node", node, parent, depth, row: 0 };
    const hides = kid => step.mass[kid] < least && !step.onPath.has(kid) && !expanded.has(node);
    const leaf = extra => ({ item: extra, all: [extra], first: [0], last: [0] });
    const parts = step.kids[node].filter(kid => !hides(kid)).map(kid => place(kid, item, depth + 1));
    const extra = { node, parent: item, depth: depth + 1, row: 0 };
    if (step.bonus !== null && node === step.end) parts.push(leaf({ ...extra, kind: "bonus" }));
    const count = step.kids[node].filter(hides).reduce((sum, kid) => sum + 1 + step.below(kid), 0);
    if (count) parts.push(leaf({ ...extra, kind: "more", count }));
    const all = [item], first = [], last = [];
    for (const part of parts) {
      const shift = Math.max(0, ...part.first.map((row, level) => (last[level] ?? -1) + 1 - row));
      for (const other of part.all) other.row += shift;
      part.first.forEach((row, level) => { first[level] ??= row + shift; });
      part.last.forEach((row, level) => { last[level] = row + shift; });
      all.push(...part.all);
    }
    item.row = parts.length ? parts[0].item.row : 0;
    return { item, all, first: [item.row, ...first], last: [item.row, ...last] };
  }

  const { all, last } = place(0, null, 0);
  return { items: all, rows: 1 + Math.max(...last) };
}

// ---- one display ----

class Display {
  constructor(host, style, model) {
    this.model = model;
    this.steps = model.steps.map(data => new Step(data, model));
    this.round = this.best();
    this.selected = null;   // an item of the tree, or null for the round itself
    this.pinned = null;     // ... that stays when the pointer leaves
    this.least = 0;
    this.expanded = new Set();
    this.timer = null;
    this.root = el("div", { class: "root", tabindex: -1, keydown: event => this.key(event) });
    host.textContent = "";
    host.attachShadow({ mode: "open" }).append(el("style", {}, style), this.root);
    this.build();
    this.draw();
    followTheme(host);
  }

  // The round that gained most is the one to begin with.
  best() {
    return this.steps.reduce((best, step, i) => step.path.length > this.steps[best].path.length ? i : best, 0);
  }

  get step() { return this.steps[this.round]; }
  shape(draft) { return this.model.drafts[draft] === undefined || this.model.drafts[draft] === "by hand" ? BY_HAND : SHAPES[draft % SHAPES.length]; }
  name(draft) { return this.model.drafts[draft] ?? "by hand"; }
  authorClass(authors) { return authors.length ? `by${authors[0] % 6}${authors.length > 1 ? " many" : ""}` : "target"; }

  // ---- what is built once ----

  build() {
    this.treeBox = el("div", { class: "tree", role: "tree", "aria-label": "token tree" });
    this.summary = el("p");
    this.key_ = el("div", { class: "key" });
    this.facts = el("div", { class: "panel facts" });
    this.maskBox = el("div", { class: "scroll" });
    const treeScroll = el("div", { class: "scroll" }, this.treeBox);
    const tree = el("section", { class: "panel grown" },
      el("div", { class: "head" }, this.summary, this.threshold()), treeScroll, this.key_);
    const mask = el("section", { class: "panel mask" },
      el("h3", {}, "Attention mask"), el("p", {}, "Each row is a token of the pass; it sees the text so far and the marked columns: its ancestors and itself."),
      this.maskBox);
    this.root.append(...[
      this.figures(), this.answer(), this.scrubber(), el("div", { class: "stage" }, tree, this.facts, mask), this.notes(),
    ].filter(part => part));
    const rows = Math.max(...this.steps.map(step => layout(step, 0, this.expanded).rows));
    treeScroll.style.minHeight = `${Math.min(300, TOP + 18 + ROW * rows)}px`;   // so that playing does not move the page
  }

  figures() {
    const { stats, rule, seed } = this.model;
    if (!stats) return null;
    const pairs = [
      [String(stats.new_tokens), "tokens"],
      [String(stats.target_passes), "target passes"],
      [number(stats.tokens_per_target_pass), "tokens per pass"],
      ...(stats.seconds.total ? [[number(stats.seconds.total), "seconds"]] : []),
      [seed === null ? "greedy" : `seed ${seed}`, seed === null ? "" : rule === "coins" ? "multi-step sampling" : rule === "coupled" ? "coupled sampling" : "sampled"],
    ];
    return el("dl", { class: "figures" }, pairs.map(([figure, unit]) => el("div", {}, el("dt", {}, unit), el("dd", {}, figure))));
  }

  // Prompt, the answer's tokens by who wrote them, and what the lines under them mean.
  answer() {
    if (!this.model.prompt) return null;
    this.words = [];
    const line = el("div", { class: "answer", role: "group", "aria-label": "the answer, token by token" });
    this.steps.forEach((step, round) => step.emitted.forEach((token, k) => {
      const text = step.text(token), authors = step.authorsOfEmitted(k);
      const by = authors.length ? authors.map(a => this.name(a)).join(" and ") : "the target";
      const word = el("span", {
        class: `word ${this.authorClass(authors)}`, role: "button", tabindex: this.words.length ? -1 : 0,
        "aria-label": `${text}, by ${by}, round ${round + 1}`, title: `by ${by}, round ${round + 1}`,
        click: () => this.go(round), keydown: event => this.wordKey(event, word),
      }, spaced(text));
      this.words.push({ element: word, round });
      line.append(word, ...(text.endsWith("⏎") ? [el("br")] : []), "\u200b");
    }));
    const { prompt } = this.model;
    return el("section", {},
      el("details", { class: "prompt" }, el("summary", {}, `Prompt, ${plural(prompt.tokens, "token")}`), el("pre", {}, prompt.text)),
      line, this.legend());
  }

  legend() {
    const counts = new Map();
    for (const step of this.steps) step.emitted.forEach((_, k) => {
      const key = step.authorsOfEmitted(k).join();
      counts.set(key, (counts.get(key) ?? 0) + 1);
    });
    const entries = [...counts].sort((a, b) => b[1] - a[1]).map(([key, count]) => {
      const authors = key ? key.split(",").map(Number) : [];
      const who = authors.length ? authors.map(a => `${this.shape(a)} ${this.name(a)}`).join(" and ") : "the target itself";
      return el("li", {}, el("span", { class: `word ${this.authorClass(authors)}` }, who), ` ${count}`);
    });
    return el("ul", { class: "legend", "aria-label": "who wrote how many tokens" }, entries);
  }

  // Play, bars of what each round emitted, and a slider under them.
  scrubber() {
    if (this.steps.length < 2) return null;
    const last = this.steps.length - 1, most = Math.max(...this.steps.map(step => step.emitted.length));
    const unit = Math.min(8, (46 - most) / most), width = `min(14px, ${(70 / this.steps.length).toFixed(2)}%)`;
    this.bars = this.steps.map((step, round) => el("div", {
      class: "bar", title: `round ${round + 1}: ${plural(step.emitted.length, "token")}`,
      style: `left: ${100 * round / last}%; width: ${width}`, click: () => this.go(round),
    }, step.emitted.map((_, k) => el("i", { class: this.authorClass(step.authorsOfEmitted(k)), style: `height: ${unit}px` }))));
    this.slider = el("input", {
      type: "range", min: 0, max: last, value: this.round, "aria-label": "round", input: () => this.go(Number(this.slider.value)),
    });
    this.playButton = el("button", { type: "button", click: () => this.play(!this.timer) });
    this.where = el("div", { class: "where", "aria-live": "polite" });
    const arrow = (label, by, path) => el("button", { type: "button", "aria-label": label, title: label, click: () => this.go(this.round + by) }, icon(path));
    return el("section", { class: "rounds" }, this.playButton,
      arrow("previous round", -1, "M10 1 3 7l7 6z"), arrow("next round", 1, "M4 1l7 6-7 6z"),
      el("div", { class: "track" }, el("div", { class: "bars" }, this.bars), this.slider), this.where);
  }

  threshold() {
    const output = el("output", {}, "none");
    const slider = el("input", {
      type: "range", min: 0, max: LEAST.length - 1, value: 0, "aria-label": "hide paths less likely than",
      input: () => {
        this.least = LEAST[Number(slider.value)];
        this.expanded = new Set();
        const words = this.least ? `under ${100 * this.least} %` : "none";
        output.textContent = words;
        slider.setAttribute("aria-valuetext", words);
        this.draw();
      },
    });
    return el("label", {}, "hide paths", slider, output);
  }

  notes() {
    const notes = this.model.notes ?? [];
    return notes.length ? el("ul", { class: "notes" }, notes.map(note => el("li", {}, spaced(note)))) : null;
  }

  // ---- moving ----

  go(round) {
    this.round = Math.max(0, Math.min(this.steps.length - 1, round));
    this.expanded = new Set();
    this.draw();
  }

  play(on) {
    clearInterval(this.timer);
    this.timer = null;
    if (on) {
      if (this.round === this.steps.length - 1) this.go(0);
      this.timer = setInterval(() => {
        if (!this.root.isConnected) return this.play(false);   // the cell was run again
        this.go(this.round + 1);
        if (this.round === this.steps.length - 1) this.play(false);
      }, STEP_MS);
    }
    this.root.classList.toggle("playing", on);
    this.drawScrubber();
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    const own = event.target.closest?.("summary, button");
    if (event.target === this.slider || event.target.matches?.("input") || this.steps.length < 2) return;
    if (event.key in moves) this.go(this.round + moves[event.key]);
    else if (event.key === " " && !own) this.play(!this.timer);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // In the answer, arrows walk along the tokens.
  wordKey(event, element) {
    const place = this.words.findIndex(word => word.element === element);
    const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: this.words.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.go(this.words[place].round);
    else if (this.words[to]) this.moveFocus(this.words.map(word => word.element), this.words[to].element);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // In the tree, arrows walk from node to node: right to a child, left to the parent, up and down along the rows.
  chipKey(event, item) {
    const rows = this.items.filter(other => other.depth === item.depth).sort((a, b) => a.row - b.row);
    const to = {
      ArrowRight: this.items.find(other => other.parent === item), ArrowLeft: item.parent,
      ArrowUp: rows[rows.indexOf(item) - 1], ArrowDown: rows[rows.indexOf(item) + 1],
    };
    if (event.key === "Escape") this.pin(null);
    else if (!(event.key in to)) return;
    else if (to[event.key]) this.moveFocus(this.items.map(other => other.chip), to[event.key].chip);
    event.preventDefault();
    event.stopPropagation();
  }

  // One element of a group is a tab stop, the one that had the focus last.
  moveFocus(group, element) {
    for (const other of group) other.setAttribute("tabindex", other === element ? 0 : -1);
    element.focus();
  }

  pin(item) {
    this.pinned = item;
    this.select(item);
  }

  // ---- what is drawn anew ----

  draw() {
    this.selected = this.pinned = null;
    const focused = this.treeBox.contains(this.root.getRootNode().activeElement);
    this.drawScrubber();
    this.drawWords();
    this.drawTree();
    this.drawMask();
    this.drawFacts();
    if (focused) this.root.focus({ preventScroll: true });   // what had it is gone, but keys shall go on working
  }

  drawScrubber() {
    if (!this.slider) return;
    this.slider.value = this.round;
    this.slider.setAttribute("aria-valuetext", `round ${this.round + 1} of ${this.steps.length}`);
    this.bars.forEach((bar, round) => bar.classList.toggle("now", round === this.round));
    this.where.replaceChildren("round ", el("b", {}, String(this.round + 1)), ` of ${this.steps.length}`);
    const label = this.timer ? "pause" : "play";
    this.playButton.setAttribute("aria-label", label);
    this.playButton.setAttribute("title", label);
    this.playButton.replaceChildren(icon(this.timer ? "M3 1h3v12H3zM8 1h3v12H8z" : "M3 1l10 6-10 6z"));
  }

  drawWords() {
    for (const { element, round } of this.words ?? []) {
      element.classList.toggle("now", round === this.round && this.steps.length > 1);
      element.classList.toggle("later", round > this.round);
    }
  }

  drawTree() {
    const step = this.step, { items, rows } = layout(step, this.least, this.expanded);
    this.items = items;
    for (const item of items) this.makeChip(item);
    const widths = [];
    for (const item of items) widths[item.depth] = Math.max(widths[item.depth] ?? 0, item.width);
    const spare = (this.treeBox.parentElement.clientWidth || Infinity) - 28 - widths.reduce((sum, width) => sum + width);
    const gap = Math.max(LEAST_GAP, Math.min(GAP, spare / Math.max(1, widths.length - 1)));
    const lefts = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, width) => sum + width + gap, 0));
    const width = lefts[lefts.length - 1] + widths[widths.length - 1], height = TOP + rows * ROW;
    const edges = el("svg:svg", { width, height, "aria-hidden": "true" });
    for (const item of items) {
      item.x = lefts[item.depth];
      item.y = TOP + item.row * ROW;
      item.chip.style.cssText = `left: ${item.x}px; top: ${item.y}px; width: ${item.width}px`;
      if (item.parent) edges.append(item.edge = this.edge(item));
    }
    const depths = widths.map((_, depth) => el("span", { class: "depth", style: `left: ${lefts[depth]}px` },
      step.position === null ? ["root", "depth 1"][depth] ?? `${depth}` : depth ? `${step.position + depth}` : `position ${step.position}`));
    this.treeBox.style.cssText = `width: ${width}px; height: ${height}px`;
    this.treeBox.replaceChildren(edges, ...depths, ...items.map(item => item.chip));
    this.summary.replaceChildren(...this.summaryOf(step));
    this.key_.replaceChildren(...this.keyOf(step));
  }

  edge(item) {
    const { parent } = item, x = parent.x + parent.width, y = parent.y + 13, toY = item.y + 13, half = (item.x - x) / 2;
    const kind = item.kind === "node" ? this.step.state(item.node) : item.kind;
    const by = this.authorClass(item.kind === "node" ? this.step.authors(item.node) : []);
    const drafted = kind === "rejected" || kind === "unreached" || kind === "drafted";
    return el("svg:path", {
      class: `edge ${kind} ${by}`, d: `M${x} ${y}C${x + half} ${y} ${x + half} ${toY} ${item.x} ${toY}`,
      "stroke-width": drafted ? 1 + 1.5 * (this.step.q[item.node] ?? 1) : null,
    });
  }

  makeChip(item) {
    const { node, kind } = item, step = this.step;
    const token = kind === "bonus" ? step.bonus : step.tokens[node];
    const text = kind === "more" ? `+${item.count}` : step.text(token);
    const state = kind === "node" ? step.state(node) : kind;
    const authors = kind === "node" ? step.authors(node) : [];
    const mark = MARKS[state], bars = kind === "node" && node > 0;
    item.width = Math.round(Math.min(cells(text), LONGEST) * CHAR) + 16 + (authors.length ? 5 + 8 * authors.length : 0) + (mark ? 16 : 0);
    item.width = Math.max(item.width, kind === "more" ? 36 : node === 0 && kind === "node" ? 78 : 46);
    item.chip = el("div", {
      class: `chip ${state} ${this.authorClass(authors)}`, role: "treeitem", tabindex: node === 0 && kind === "node" ? 0 : -1,
      "aria-level": item.depth + 1, "aria-label": this.describe(item, text, state, authors), "data-node": kind === "node" ? node : kind,
      mouseenter: () => this.select(item), mouseleave: () => this.select(this.pinned), focus: () => this.pin(item),
      click: () => (kind === "more" ? this.expand(node) : this.moveFocus(this.items.map(other => other.chip), item.chip)),
      keydown: event => (kind === "more" && (event.key === "Enter" || event.key === " ") ? (event.preventDefault(), event.stopPropagation(), this.expand(node)) : this.chipKey(event, item)),
    },
      authors.length ? el("span", { class: "who" }, authors.map(a => this.shape(a)).join("")) : null,
      el("span", { class: "text" }, spaced(text)),
      mark ? el("span", { class: "fate" }, mark) : null,
      bars && step.q[node] !== null && el("span", { class: "part q" }, el("i", { style: `width: ${100 * step.q[node]}%` })),
      bars && step.inspected && el("span", { class: "part p" }, el("i", { style: `width: ${100 * step.p[node]}%` })));
  }

  // A chip in words, for those who do not see it.
  describe({ kind, node, count }, text, state, authors) {
    const step = this.step;
    if (kind === "more") return `${plural(count, "node")} less likely than ${100 * this.least} %, hidden; press to show`;
    if (kind === "bonus") return `${text}, the target's own token`;
    if (node === 0) return `${text}, the root`;
    const figures = [step.q[node] === null ? "" : `, draft ${percent(step.q[node])}`, step.inspected ? `, target ${percent(step.p[node])}` : ""];
    return `${text}, ${state}, by ${authors.map(a => this.name(a)).join(" and ")}${figures.join("")}`;
  }

  expand(node) {
    this.expanded.add(node);
    this.drawTree();
    const child = this.items.find(item => item.kind === "node" && item.parent?.node === node);
    if (child) this.moveFocus(this.items.map(item => item.chip), child.chip);
  }

  summaryOf(step) {
    const size = `${plural(step.size - 1, "node")} in ${plural(Math.max(...step.depths), "level")}`;
    const change = step.change && step.change !== "as decoded" ? [" · ", ...spaced(step.change)] : [];
    if (!step.states) return [size];
    return [el("b", {}, `${step.path.length} accepted`), step.bonus === null ? "" : " + 1 of the target's own", ` · ${size}`, ...change];
  }

  keyOf(step) {
    const entries = step.states
      ? [["✓", "accepted"], ["✗", "rejected"], ["┄", "not reached"], ["+", "the target's own"]] : [];
    const drafts = unique(step.draws.flat().map(draw => draw[0])).sort().map(draft => [this.shape(draft), this.name(draft)]);
    const bars = step.size < 2 ? [] : [["▁", step.inspected ? "bars: draft q above target p" : "bar: draft q"]];
    return [...drafts, ...entries, ...bars].map(([sign, word]) => el("span", {}, el("b", {}, sign), ` ${word}`));
  }

  // The mask: what each node's token sees. Rows light up with their nodes.
  drawMask() {
    const step = this.step, n = step.size, cell = n <= 26 ? 12 : n <= 60 ? 8 : 5, named = cell > 6;
    const label = named ? 80 : 0, prefix = 44, left = label + prefix + 4, top = 14;
    this.maskRows = [];
    const svg = el("svg:svg", { width: left + n * cell + 2, height: top + n * cell + 2, role: "img", "aria-label": `attention mask of ${plural(n, "node")}` },
      el("svg:text", { x: label, y: 9 }, "prefix"), el("svg:text", { x: left + 1, y: 9 }, "tree"));
    for (let i = 0; i < n; i++) {
      const text = [...step.text(step.tokens[i])], short = (text.length > 10 ? [...text.slice(0, 9), "…"] : text).join("").replaceAll("␠", "␣");
      const y = top + i * cell;
      const row = el("svg:g", { class: this.authorClass(step.authors(i)), mouseenter: () => this.select(this.itemOf(i)), mouseleave: () => this.select(this.pinned) },
        named && el("svg:text", { x: label - 6, y: y + cell - 2, "text-anchor": "end" }, short) || null,
        el("svg:rect", { class: "prefix", x: label, y: y + 1, width: prefix, height: cell - 2 }),
        step.line(i).map(j => el("svg:rect", { class: "cell", x: left + j * cell + 1, y: y + 1, width: cell - 2, height: cell - 2 })),
        el("svg:rect", { class: "hit", x: 0, y, width: left + n * cell, height: cell }));
      this.maskRows.push(row);
      svg.append(row);
    }
    this.maskBox.replaceChildren(svg);
  }

  // A node's item in the tree; of a hidden one, the item that stands for it.
  itemOf(node) {
    for (const ancestor of this.step.line(node).reverse()) {
      const item = this.items.find(other => other.kind === "node" && other.node === ancestor);
      if (item) return ancestor === node ? item : this.items.find(other => other.kind === "more" && other.node === ancestor);
    }
    return null;
  }

  // Show one item's figures; light it up with its ancestors, here and in the mask.
  select(item) {
    this.selected = item;
    const lit = new Set();
    for (let above = item; above; above = above.parent) lit.add(above);
    for (const other of this.items) {
      other.chip.classList.toggle("lit", lit.has(other));
      other.edge?.classList.toggle("lit", lit.has(other));
    }
    const nodes = new Set([...lit].filter(other => other.kind === "node").map(other => other.node));
    this.maskRows.forEach((row, i) => {
      row.classList.toggle("lit", item?.kind === "node" && item.node === i);
      row.classList.toggle("own", nodes.has(i));
    });
    this.drawFacts();
  }

  // ---- figures of what is selected ----

  drawFacts() {
    const item = this.selected;
    this.facts.replaceChildren(...(!item ? this.roundFacts() : item.kind === "node" ? this.nodeFacts(item.node) : item.kind === "bonus" ? this.bonusFacts() : this.moreFacts(item)).filter(part => part));
  }

  list(pairs) {
    return el("dl", {}, pairs.filter(pair => pair).map(([term, value]) => [el("dt", {}, term), el("dd", {}, ...[value].flat())]));
  }

  title(text) { return el("h2", { class: "mono" }, spaced(text)); }

  roundFacts() {
    const step = this.step, ms = name => `${number(1000 * step.seconds[name], 1)} ms`;
    const heading = this.steps.length > 1 ? `Round ${this.round + 1}` : "The tree";
    const accepted = step.path.map(node => step.text(step.tokens[node])).join(" ");
    return [
      el("h2", {}, heading),
      el("p", {}, "Point at a token, or walk the tree with Tab and the arrow keys."),
      this.list([
        ["drafted", `${plural(step.size - 1, "node")}`],
        step.states && ["accepted", accepted ? el("span", { class: "mono" }, spaced(accepted)) : "none"],
        step.bonus !== null && ["target's own", el("span", { class: "mono" }, spaced(step.text(step.bonus)))],
        step.position !== null && this.positions(step),
        step.seconds?.total && ["time", ms("total")],
        step.seconds?.total && ["target", ms("target")],
        step.seconds?.total && ["drafts", ms("draft")],
      ]),
      step.inspected || !step.states ? null : el("p", { class: "hint" }, "inspect(decoder, result) adds what the target thought of every node."),
    ];
  }

  positions({ position, emitted }) {
    const [first, last] = [position + 1, position + emitted.length];
    return last > first ? ["positions", `${first} to ${last}`] : ["position", `${first}`];
  }

  nodeFacts(node) {
    const step = this.step, at = step.position === null ? null : step.position + step.depths[node];
    const moved = ["root", "accepted"].includes(step.state(node));
    const coupled = this.model.rule === "coupled";
    return [
      this.title(step.text(step.tokens[node])),
      el("p", {}, step.why ? spaced(step.why[node]) : step.states ? step.state(node) : node ? "" : "the root"),
      this.list([
        node > 0 && ["drafted by", this.drawsOf(node)],
        node > 0 && step.inspected && ["target p", percent(step.p[node])],
        node > 0 && [coupled ? "draft q, given g" : "draft q", percent(step.q[node])],
        node > 0 && step.inspected && !coupled && ["p / q", number(step.ratio?.[node])],
        node > 0 && ["path", percent(step.mass[node])],
        ...(step.inspected && node > 0 ? this.chance(node) : []),
        at !== null && ["position", String(at)],
        at !== null && ["cache slot", `${step.position + node}${moved && step.position + node !== at ? `, then ${at}` : ""}`],
        ["token id", String(step.tokens[node])],
      ]),
      ...this.alternatives(node),
    ];
  }

  drawsOf(node) {
    const byDraft = unique(this.step.draws[node].map(draw => draw[0]));
    return byDraft.map(draft => {
      const orders = this.step.draws[node].filter(draw => draw[0] === draft).map(draw => ordinal(draw[1] + 1));
      return `${this.shape(draft)} ${this.name(draft)}${this.name(draft) === "by hand" ? "" : `, ${orders.join(" and ")}`}`;
    }).join("; ");
  }

  // Noise, margin and coins, whichever decided.
  chance(node) {
    const step = this.step, noise = step.noise?.[node] ?? null, margin = step.margin?.[node] ?? null;
    const tests = (step.tests?.[node] ?? []).map(([coin, ratio]) => `${number(coin, 3)} against ${number(ratio, 3)}`);
    return [
      noise !== null && ["noise g", number(noise)],
      noise !== null && step.p[node] > 0 && ["log p + g", number(Math.log(step.p[node]) + noise)],
      margin !== null && ["margin", `${margin > 0 ? "+" : ""}${number(margin)} nats`],
      tests.length > 0 && ["coin", tests.join("; ")],
    ];
  }

  alternatives(node) {
    const step = this.step;
    if (!step.inspected) return [];
    const rows = step.top[node].map(([token, p], place) => {
      const chosen = place === 0 && this.model.rule !== "coins";
      return [
        el("span", { class: `mono${chosen ? " chosen" : ""}` }, chosen ? "→ " : "  ", spaced(step.text(token))),
        el("span", { class: "part" }, el("i", { style: `width: ${100 * p}%` })),
        el("span", { class: "figure" }, percent(p)),
      ];
    });
    const words = this.model.rule === "coupled" ? "The target after it, by log p + g" : "The target after it, by p";
    return [el("h3", {}, words), el("div", { class: "rank" }, rows)];
  }

  bonusFacts() {
    const step = this.step, known = step.top?.[step.end].find(([token]) => token === step.bonus);
    return [
      this.title(step.text(step.bonus)),
      el("p", {}, "the target's own token after the accepted path; the root of the next tree"),
      this.list([
        known && ["target p", percent(known[1])],
        known?.[2] !== undefined && ["noise g", number(known[2])],
        step.position !== null && ["position", String(step.position + step.path.length + 1)],
        ["cache slot", "none yet"],
        ["token id", String(step.bonus)],
      ]),
      ...this.alternatives(step.end),
    ];
  }

  moreFacts({ count }) {
    return [el("h2", {}, plural(count, "hidden node")), el("p", {}, `Each path is less likely than ${100 * this.least} %. Press to show them.`)];
  }
}

function icon(path) {
  return el("svg:svg", { class: "icon", viewBox: "0 0 14 14", "aria-hidden": "true" }, el("svg:path", { d: path }));
}

// ---- light or dark ----

// What the page around says: the notebook's theme, else the colour behind the display, else the system's wish.
function isDark(host) {
  const { body, documentElement: html } = document;
  const said = [body.dataset.jpThemeLight, body.dataset.vscodeThemeKind, html.getAttribute("theme"), html.dataset.theme, body.className];
  if (said[0]) return said[0] === "false";
  if (said.some(word => /\bdark\b|vscode-dark/.test(word ?? ""))) return true;
  if (said.some(word => /\blight\b|vscode-light/.test(word ?? ""))) return false;
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

// Fill the elements with this id that are empty still; a notebook may show one result twice.
function fillAll(id, style, model) {
  for (const host of document.querySelectorAll(`[id="${id}"]`)) {
    if (host.shadowRoot) continue;
    host.setAttribute("data-lm-suppress-shortcuts", "true");   // arrow keys are ours while the focus is inside
    new Display(host, style, model);
  }
}
