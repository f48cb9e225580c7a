// The mask: what each node's token sees.

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
      mouseenter: () => display.select(display.tree.itemOf(node)), mouseleave: () => display.select(display.held),
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
