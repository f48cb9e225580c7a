// Draws a description (description.py says what is in it) into elements of the page.
//
// Everything that comes from the description reaches the document as text nodes, through `el`: no markup is ever made
// from it.  All names are local, and what is drawn lives in a shadow root: displays on one page are independent.

const LEAST = [0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3];   // thresholds of path probability
const ROW = 34, TOP = 22, CHARACTER = 7.6;        // of the tree, in pixels
const GAP = 24, LEAST_GAP = 12, PADDING = 14;     // between columns; the same where they are many; around the tree
const LONGEST = 18;                               // characters of a token in a chip
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

// Text whose signs for white space are drawn faintly.
function spaced(text) {
  const sign = part => el("span", { class: part === "␠" ? "space blank" : "space" }, part);
  return text.split(/([␠⏎⇥])/).filter(part => part).map(part => ("␠⏎⇥".includes(part) ? sign(part) : part));
}

function percent(p) {
  if (p === null || p === undefined) return "–";
  const value = 100 * p;
  return value === 0 ? "0 %" : value < 0.1 ? "<0.1 %" : `${value.toFixed(value < 10 ? 1 : 0)} %`;
}

const number = (x, digits = 2) => (x === null || x === undefined ? "–" : x.toFixed(digits).replace("-", "−"));
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const threshold = least => `${Number((100 * least).toPrecision(2))} %`;
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
    this.onPath = new Set(data.path);
    this.inspected = "p" in data;
    this.text = token => texts[token] ?? String(token);
  }

  textOf(node) { return this.text(this.tokens[node]); }
  state(node) { return this.states ? this.states[node] : node === 0 ? "root" : "drafted"; }

  // The drafts that proposed a node, or the k-th emitted token: none if it is the target's own.
  authors(node) { return unique(this.draws[node].map(draw => draw[0])); }
  authorsOfEmitted(k) { return k < this.path.length ? this.authors(this.path[k]) : []; }

  // The nodes from the root to a node.
  line(node) { return node > 0 ? [...this.line(this.parents[node]), node] : [0]; }

  // How many nodes are below a node.
  below(node) { return sum(this.kids[node].map(kid => 1 + this.below(kid))); }
}

// What is drawn of a tree: nodes, the bonus token, and what stands for hidden nodes ("more"), at its first one's line.
// Rows are the lines of the description, without the gaps that hidden nodes leave.
function layout(step, least, expanded) {
  const items = [], byNode = [];
  const add = (kind, node, parent, line, count = 0) => {
    items.push({ kind, node, parent, line, count, depth: parent ? parent.depth + 1 : 0 });
    return items[items.length - 1];
  };
  for (let node = 0; node < step.size; node++) {
    const parent = byNode[step.parents[node]], line = step.lines[node];
    if (node > 0 && !parent) continue;   // above it, one is hidden
    if (step.mass[node] >= least || step.onPath.has(node) || expanded.has(parent.node)) {
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

// ---- one display: which round and which item are shown ----

class Display {
  constructor(host, style, model) {
    this.model = model;
    this.steps = model.steps.map(data => new Step(data, model.texts));
    this.round = this.best();
    this.settings = null;   // the item that stays selected when the pointer leaves; null = the round itself
    this.timer = null;
    this.root = el("div", { class: "root", tabindex: -1, keydown: event => this.key(event) });
    host.textContent = "";
    host.attachShadow({ mode: "open" }).append(el("style", {}, style), this.root);
    const result = Boolean(model.prompt), several = this.steps.length > 1;
    this.answer = result ? new Answer(this) : null;
    this.scrubber = several ? new Scrubber(this) : null;
    this.tree = new Tree(this);
    this.facts = new Facts(this);
    this.mask = new Mask(this);
    const stage = el("div", { class: "stage" }, this.tree.element, this.facts.element, this.mask.element);
    this.root.append(...[
      result ? figures(model) : null, this.answer?.element, this.scrubber?.element, stage, notes(model),
    ].filter(part => part));
    this.draw();
    followTheme(host);
  }

  // The round that gained most is the one to begin with.
  best() {
    const gains = this.steps.map(step => step.path.length);
    return gains.indexOf(Math.max(...gains));
  }

  get step() { return this.steps[this.round]; }

  // What drafts are called and look like.
  name(draft) { return this.model.drafts[draft]; }
  shape(draft) { return this.model.shapes[draft]; }
  names(authors) { return authors.map(draft => this.name(draft)).join(" and "); }
  colour(authors) { return authors.length ? `by${authors[0] % 6}${authors.length > 1 ? " many" : ""}` : "target"; }

  go(round) {
    this.round = Math.max(0, Math.min(this.steps.length - 1, round));
    this.tree.expanded.clear();
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
    this.scrubber.draw();
  }

  // Arrows go from round to round wherever the focus is, but for sliders, words and nodes, which have their own.
  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    if (this.steps.length < 2 || event.target.matches("input")) return;
    if (event.key in moves) this.go(this.round + moves[event.key]);
    else if (event.key === " " && !event.target.closest("summary, button")) this.play(!this.timer);
    else return;
    taken(event);
  }

  // Show an item's figures, and light it up with its ancestors; null shows the round's.
  select(item) {
    this.tree.light(item);
    this.mask.light(item);
    this.facts.draw(item);
  }

  lock_settings(item) {
    this.settings = item;
    this.select(item);
  }

  draw() {
    const focused = this.tree.box.contains(this.root.getRootNode().activeElement);
    this.settings = null;
    for (const part of [this.scrubber, this.answer, this.tree, this.mask, this.facts]) part?.draw();
    this.tree.scrollToEnd();
    if (focused) this.root.focus({ preventScroll: true });   // what had it is gone, but keys shall go on working
  }
}

function figures({ stats, rule, seed }) {
  const sampling = { coins: "multi-step sampling", coupled: "coupled sampling" }[rule] ?? "sampled";
  const pairs = [
    [String(stats.new_tokens), "tokens"],
    [String(stats.target_passes), "target passes"],
    [number(stats.tokens_per_target_pass), "tokens per pass"],
    [number(stats.seconds.total), "seconds"],
    seed === null ? ["greedy", ""] : [`seed ${seed}`, sampling],
  ];
  const entries = pairs.map(([figure, unit]) => el("div", {}, el("dt", {}, unit), el("dd", {}, figure)));
  return el("dl", { class: "figures" }, entries);
}

function notes(model) {
  const lines = (model.notes ?? []).map(note => el("li", {}, spaced(note)));
  return lines.length ? el("ul", { class: "notes" }, lines) : null;
}

// ---- the answer: prompt, words by who wrote them, and what the lines under them mean ----

class Answer {
  constructor(display) {
    this.display = display;
    this.words = [];
    this.rounds = [];   // of the words
    const line = el("div", { class: "answer", role: "group", "aria-label": "the answer, token by token" });
    display.steps.forEach((step, round) => step.emitted.forEach((token, k) => {
      const text = step.text(token), word = this.word(text, step.authorsOfEmitted(k), round);
      this.words.push(word);
      this.rounds.push(round);
      line.append(word, ...(text.endsWith("⏎") ? [el("br")] : []), "\u200b");   // a line may break here
    }));
    this.words[0]?.setAttribute("tabindex", 0);
    const { prompt } = display.model;
    const asked = el("details", { class: "prompt" },
      el("summary", {}, `Prompt, ${plural(prompt.tokens, "token")}`), el("pre", {}, prompt.text));
    this.element = el("section", {}, asked, line, this.legend());
  }

  word(text, authors, round) {
    const by = `by ${authors.length ? this.display.names(authors) : "the target"}, round ${round + 1}`;
    const word = el("span", {
      class: `word ${this.display.colour(authors)}`, role: "button", tabindex: -1,
      title: by, "aria-label": `${text}, ${by}`,
      click: () => this.display.go(round), keydown: event => this.key(event, word),
    }, spaced(text));
    return word;
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
      const names = authors.map(draft => `${this.display.shape(draft)} ${this.display.name(draft)}`).join(" and ");
      const who = el("span", { class: `word ${this.display.colour(authors)}` }, names || "the target itself");
      return el("li", {}, who, ` ${count}`);
    });
    return el("ul", { class: "legend", "aria-label": "who wrote how many tokens" }, entries);
  }

  // Arrows walk along the words; enter goes to a word's round.
  key(event, word) {
    const index = this.words.indexOf(word);
    const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: this.words.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.display.go(this.rounds[index]);
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

// ---- the scrubber: play, bars of what each round emitted, and a slider under them ----

class Scrubber {
  constructor(display) {
    this.display = display;
    const { steps } = display, last = steps.length - 1;
    const most = Math.max(...steps.map(step => step.emitted.length)), unit = Math.min(8, (46 - most) / most);
    this.bars = steps.map((step, round) => {
      const parts = step.emitted.map((_, k) =>
        el("i", { class: display.colour(step.authorsOfEmitted(k)), style: `height: ${unit}px` }));
      return el("div", {
        class: "bar", title: `round ${round + 1}: ${plural(step.emitted.length, "token")}`,
        click: () => display.go(round),
        style: `left: ${100 * round / last}%; width: min(14px, ${(70 / steps.length).toFixed(2)}%)`,
      }, parts);
    });
    this.slider = el("input", {
      type: "range", min: 0, max: last, "aria-label": "round", input: () => display.go(Number(this.slider.value)),
    });
    this.play = el("button", { type: "button", click: () => display.play(!display.timer) });
    this.where = el("div", { class: "where", "aria-live": "polite" });
    this.element = el("section", { class: "rounds" },
      this.play, this.arrow("previous round", -1, "M10 1 3 7l7 6z"), this.arrow("next round", 1, "M4 1l7 6-7 6z"),
      el("div", { class: "track" }, el("div", { class: "bars" }, this.bars), this.slider), this.where);
  }

  arrow(label, by, path) {
    const click = () => this.display.go(this.display.round + by);
    return el("button", { type: "button", "aria-label": label, title: label, click }, icon(path));
  }

  draw() {
    const { round, steps, timer } = this.display, label = timer ? "pause" : "play";
    this.slider.value = round;
    this.slider.setAttribute("aria-valuetext", `round ${round + 1} of ${steps.length}`);
    this.bars.forEach((bar, i) => bar.classList.toggle("now", i === round));
    this.where.replaceChildren("round ", el("b", {}, String(round + 1)), ` of ${steps.length}`);
    this.play.setAttribute("aria-label", label);
    this.play.setAttribute("title", label);
    this.play.replaceChildren(icon(timer ? "M3 1h3v12H3zM8 1h3v12H8z" : "M3 1l10 6-10 6z"));
  }
}

// ---- the tree: chips and the lines between them ----

class Tree {
  constructor(display) {
    this.display = display;
    this.least = 0;              // paths less likely than this are hidden
    this.expanded = new Set();   // nodes whose hidden children are shown all the same
    this.items = [];
    this.box = el("div", { class: "tree", role: "tree", "aria-label": "token tree" });
    this.summary = el("p");
    this.key = el("div", { class: "key" });
    this.scroll = el("div", { class: "scroll" }, this.box);
    this.element = el("section", { class: "panel grown" },
      el("div", { class: "head" }, this.summary, this.threshold()), this.scroll, this.key);
    const lines = Math.max(...display.steps.flatMap(step => step.lines));
    this.scroll.style.minHeight = `${Math.min(300, TOP + 18 + ROW * (lines + 1))}px`;   // so that playing moves nothing
  }

  threshold() {
    const output = el("output", {}, "none");
    const slider = el("input", {
      type: "range", min: 0, max: LEAST.length - 1, value: 0, "aria-label": "hide paths less likely than",
      input: () => {
        this.least = LEAST[Number(slider.value)];
        output.textContent = this.least ? `under ${threshold(this.least)}` : "none";
        slider.setAttribute("aria-valuetext", output.textContent);
        this.display.go(this.display.round);
      },
    });
    return el("label", {}, "hide paths", slider, output);
  }

  draw() {
    const { step } = this.display, { items, rows } = layout(step, this.least, this.expanded);
    this.items = items;
    const widths = [];
    for (const item of items) {
      this.makeChip(item);
      widths[item.depth] = Math.max(widths[item.depth] ?? 0, item.width);
    }
    const free = (this.scroll.clientWidth || Infinity) - 2 * PADDING - sum(widths);
    const gap = Math.max(LEAST_GAP, Math.min(GAP, free / Math.max(1, widths.length - 1)));
    const lefts = widths.map((_, depth) => sum(widths.slice(0, depth)) + depth * gap);
    const width = sum(widths) + (widths.length - 1) * gap, height = TOP + rows * ROW;
    const edges = el("svg:svg", { width, height, "aria-hidden": "true" });
    for (const item of items) {
      [item.x, item.y] = [lefts[item.depth], TOP + item.row * ROW];
      item.chip.style.cssText = `left: ${item.x}px; top: ${item.y}px; width: ${item.width}px`;
      if (item.parent) edges.append(item.edge = this.edge(item));
    }
    const depths = lefts.map((left, depth) =>
      el("span", { class: "depth", style: `left: ${left}px` }, this.depth(depth)));
    this.box.style.cssText = `width: ${width}px; height: ${height}px`;
    this.box.replaceChildren(edges, ...depths, ...items.map(item => item.chip));
    this.summary.replaceChildren(...this.summaryOf(step));
    this.key.replaceChildren(...this.keyOf(step));
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
    return el("svg:path", {
      class: `edge ${state} ${this.display.colour(kind === "node" ? step.authors(node) : [])}`,
      d: `M${fromX} ${fromY}C${fromX + half} ${fromY} ${fromX + half} ${toY} ${x} ${toY}`,
      "stroke-width": kind === "node" ? 1 + 1.5 * (step.q[node] ?? 1) : 1,   // of paths that count, the style says more
    });
  }

  makeChip(item) {
    const { kind, node } = item, { step } = this.display, more = kind === "more";
    const authors = kind === "node" ? step.authors(node) : [], state = kind === "node" ? step.state(node) : kind;
    const text = more ? `+${item.count}` : kind === "bonus" ? step.text(step.bonus) : step.textOf(node);
    const mark = this.display.model.marks[state], shapes = authors.map(draft => this.display.shape(draft)).join("");
    const columns = more ? text.length : this.display.model.columns[kind === "bonus" ? step.bonus : step.tokens[node]];
    const least = more ? 36 : state === "root" ? 78 : 46;
    const words = CHARACTER * Math.min(columns, LONGEST) + (shapes ? 5 + 8 * authors.length : 0) + (mark ? 16 : 0);
    item.width = Math.max(least, Math.round(16 + words));
    item.chip = el("div", {
      class: `chip ${state} ${this.display.colour(authors)}`, "data-node": kind === "node" ? node : kind,
      role: "treeitem", tabindex: state === "root" ? 0 : -1, "aria-level": item.depth + 1,
      "aria-label": this.describe(item, text, state, authors),
      mouseenter: () => this.display.select(item), mouseleave: () => this.display.select(this.display.settings),
      focus: () => this.display.lock_settings(item), click: () => (more ? this.expand(node) : this.focus(item)),
      keydown: event => this.chipKey(event, item),
    },
      shapes && el("span", { class: "who" }, shapes), el("span", { class: "text" }, spaced(text)),
      mark && el("span", { class: "sign" }, mark),
      kind === "node" && node > 0 && [bar("q", step.q[node]), step.inspected && bar("p", step.p[node])]);
  }

  // A chip in words, for those who do not see it.
  describe({ kind, node, count }, text, state, authors) {
    const { step } = this.display;
    if (kind === "more") return `${plural(count, "node")} less likely than ${threshold(this.least)}: press to show`;
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

  // Bring the end of the accepted path into sight, without moving the page.
  scrollToEnd() {
    const end = this.items.find(item => item.kind === "bonus") ?? this.items[0];
    this.scroll.scrollTop = end.y + 2 * ROW - this.scroll.clientHeight;
    this.scroll.scrollLeft = end.x + end.width + PADDING + 6 - this.scroll.clientWidth;
  }

  summaryOf(step) {
    const size = `${plural(step.size - 1, "node")} in ${plural(Math.max(...step.depths), "level")}`;
    if (!step.states) return [size];
    const bonus = step.bonus === null ? "" : " + bonus token";
    const change = step.change && step.change !== "as decoded" ? [" · ", ...spaced(step.change)] : [];
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
    const words = "A row is a token of the pass. It sees the prefix and the marked columns: its ancestors and itself.";
    this.element = el("section", { class: "panel mask" },
      el("h3", {}, "Attention mask"), el("p", {}, words), this.scroll);
  }

  draw() {
    const { step } = this.display, n = step.size, cell = n <= 26 ? 12 : n <= 60 ? 8 : 5;
    const label = cell > 6 ? 80 : 0, prefix = 44, left = label + prefix + 4, top = 14;   // pixels
    this.rows = step.tokens.map((_, node) => this.row(node, { cell, label, prefix, left, y: top + node * cell }));
    this.scroll.replaceChildren(el("svg:svg", {
      width: left + n * cell + 2, height: top + n * cell + 2, role: "img",
      "aria-label": `attention mask of ${plural(n, "node")}`,
    }, el("svg:text", { x: label, y: 9 }, "prefix"), el("svg:text", { x: left + 1, y: 9 }, "tree"), this.rows));
  }

  row(node, { cell, label, prefix, left, y }) {
    const { display } = this, { step } = display, text = [...step.textOf(node)];
    const short = (text.length > 10 ? [...text.slice(0, 9), "…"] : text).join("").replaceAll("␠", "␣");
    const rect = (name, x, width) =>
      el("svg:rect", { class: name, x, y: y + 1, width, height: name === "hit" ? cell : cell - 2 });
    return el("svg:g", {
      class: display.colour(step.authors(node)),
      mouseenter: () => display.select(display.tree.itemOf(node)), mouseleave: () => display.select(display.settings),
    },
      label > 0 && el("svg:text", { x: label - 6, y: y + cell - 2, "text-anchor": "end" }, short),
      rect("prefix", label, prefix), step.line(node).map(seen => rect("cell", left + seen * cell + 1, cell - 2)),
      rect("hit", 0, left + step.size * cell));
  }

  light(item) {
    const line = item && item.kind === "node" ? this.display.step.line(item.node) : [];
    this.rows.forEach((row, node) => {
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
    const { step, steps, round } = this.display, ms = name => `${number(1000 * step.seconds[name], 1)} ms`;
    const [first, last] = [step.position + 1, step.position + step.emitted.length];
    const mono = text => el("span", { class: "mono" }, spaced(text));
    const accepted = step.path.map(node => step.textOf(node)).join(" ");
    const hint = "inspect(decoder, result) adds what the target thought of every node.";
    return [
      el("h2", {}, steps.length > 1 ? `Round ${round + 1}` : "The tree"),
      el("p", {}, "Point at a token, or walk the tree with Tab and the arrow keys."),
      list([
        ["drafted", plural(step.size - 1, "node")],
        step.states && ["accepted", accepted ? mono(accepted) : "none"],
        step.bonus !== null && ["bonus token", mono(step.text(step.bonus))],
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
      title(step.textOf(node)),
      el("p", {}, step.why ? spaced(step.why[node]) : step.states ? step.state(node) : node ? "drafted" : "the root"),
      list([...drafted, ...this.slots(node), ["token id", String(step.tokens[node])]]),
      ...this.alternatives(node),
    ];
  }

  drawsOf(node) {
    const { step } = this.display;
    return step.authors(node).map(draft => {
      const orders = step.draws[node].filter(draw => draw[0] === draft).map(draw => ordinal(draw[1] + 1));
      const name = this.display.name(draft);
      return `${this.display.shape(draft)} ${name}${step.q[node] === null ? "" : `, ${orders.join(" and ")}`}`;
    }).join("; ");
  }

  // Noise, margin and coins, whichever decided.
  chance(node) {
    const { step } = this.display, noise = step.noise?.[node] ?? null, margin = step.margin?.[node] ?? null;
    const tests = (step.tests?.[node] ?? []).map(([coin, ratio]) => `${number(coin, 3)} against ${number(ratio, 3)}`);
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
        el("span", { class: `mono${chosen ? " chosen" : ""}` }, chosen ? "→ " : "  ", spaced(step.text(token))),
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
      title(step.text(step.bonus)),
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
    const least = threshold(this.display.tree.least);
    return [
      el("h2", {}, plural(count, "hidden node")),
      el("p", {}, `Each path is less likely than ${least}. Press to show them.`),
    ];
  }
}

function title(text) { return el("h2", { class: "mono" }, spaced(text)); }

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

// Fill the elements with this id that are empty still; a notebook may show one result twice.
function fillAll(id, style, model) {
  for (const host of document.querySelectorAll(`[id="${id}"]`)) {
    if (host.shadowRoot) continue;
    host.setAttribute("data-lm-suppress-shortcuts", "true");   // to JupyterLab: keys are ours while the focus is inside
    new Display(host, style, model);
  }
}
