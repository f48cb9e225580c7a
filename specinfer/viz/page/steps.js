// A step that knows its tree's shape, and which of its nodes are drawn where.

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
