// Which round is shown: play, a picture of what each round emitted, and a slider under it.

// A bar a round, as high as it emitted tokens.
function bars(display) {
  const { steps } = display, last = steps.length - 1;
  const most = Math.max(...steps.map(step => step.gained)), unit = Math.min(8, (46 - most) / most);
  const marks = steps.map((step, round) => el("div", {
    class: "bar", title: `step ${round + 1}: ${plural(step.gained, "token")}`, click: () => display.go(round),
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
    const { target_passes, tokens_per_target_pass } = side.model.stats;
    const words = ` ${plural(target_passes, "target pass", "target passes")}, ${number(tokens_per_target_pass)} tokens per pass`;
    return [
      el("p", {}, el("b", {}, pair.model.names[i]), words),
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
