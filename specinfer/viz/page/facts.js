// The figures of what is selected.

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
      el("h2", {}, steps.length > 1 ? `Step ${round + 1}` : "The tree"),
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
