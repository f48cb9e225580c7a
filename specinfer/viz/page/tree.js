// The tree: chips and the lines between them.

const USUAL = 48, MOST = [8, 16, 32, USUAL, 64, 128];   // nodes shown of a larger tree: at first, and as one likes
const ROW = 34, TOP = 22, CHARACTER = 7.6;   // in pixels
const GAP = 24, LEAST_GAP = 12;              // between columns; the same where they are many
const LONGEST = 18;                          // characters of a token in a chip

class Tree {
  constructor(display) {
    this.display = display;
    this.largest = Math.max(...display.steps.map(step => step.size - 1));
    this.choices = [...MOST.filter(most => most < this.largest), Infinity];
    this.most = this.largest > USUAL ? USUAL : Infinity;   // nodes shown, at most
    this.expanded = new Set();   // nodes whose hidden children are shown all the same
    this.items = [];
    this.plane = el("div", { class: "plane" });
    this.box = el("div", { class: "tree", role: "tree", "aria-label": "token tree" }, this.plane);
    this.summary = el("p");
    this.key = el("div", { class: "key" });
    const lines = Math.max(...display.steps.flatMap(step => step.lines));
    this.pane = new Pane(this.box, TOP + 18 + ROW * (lines + 1));
    this.element = el("section", { class: "panel grown", keydown: event => this.pane.key(event) },
      el("div", { class: "head" }, this.summary, el("div", { class: "tools" }, this.count(), this.pane.buttons)),
      this.pane.element, this.key);
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

  draw() {
    const { step } = this.display, { items, rows } = layout(step, likeliest(step, this.most), this.expanded);
    this.items = items;
    const widths = [];
    for (const item of items) {
      this.makeChip(item);
      widths[item.depth] = Math.max(widths[item.depth] ?? 0, item.width);
    }
    const free = this.pane.room - sum(widths);
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
    this.plane.replaceChildren(edges, ...depths, ...items.map(item => item.chip));
    this.pane.open([width, height], items[0].y + ROW / 2);
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
      mouseenter: () => this.display.select(item), mouseleave: () => this.display.select(this.display.held),
      focus: () => this.display.hold(item), click: () => (more ? this.expand(node) : this.focus(item)),
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
    if (event.key === "Escape") this.display.hold(null);
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
