// The window that a tree is seen through: it fits the width, and mouse, keys and fingers zoom and move what is in it.

const PADDING = 14;                                                    // around what is in it, in pixels
const LEAST_FIT = 0.6, ZOOM = [0.3, 3], FURTHER = 1.25, PAN = 60;      // scales; pixels that a key moves it by
const BAR = 24;                                                        // wider than scroll bars are

class Pane {
  // Args: what is shown, an element whose one child is drawn in pixels of its own; how high it may become.
  constructor(box, highest) {
    Object.assign(this, { box, highest });
    this.fits = true;      // until the reader zooms: what is shown is as wide as there is room
    this.scale = 1;
    this.size = [1, 1];    // unscaled
    this.home = 0;         // the height that it opens at
    this.width = 0;        // of the window, when it was last fitted
    this.element = el("div", {
      class: "scroll", tabindex: 0, role: "group", "aria-label": "the tree: arrows move it, + and − zoom, 0 fits it",
      wheel: event => this.wheel(event), pointerdown: event => this.drag(event),
      touchstart: event => this.pinch(event), touchmove: event => this.pinch(event),
    }, box);
    new ResizeObserver(() => this.resized()).observe(this.element);
  }

  get buttons() {
    const button = (sign, label, click) => el("button", { type: "button", "aria-label": label, title: label, click }, sign);
    return el("span", { class: "zooms" },
      button("−", "zoom out", () => this.zoom(1 / FURTHER)), button("+", "zoom in", () => this.zoom(FURTHER)),
      button("fit", "fit the width", () => this.fit()));
  }

  // How wide what is shown may be, if it is not to be made smaller.
  get room() { return (this.element.clientWidth || Infinity) - 2 * PADDING; }

  // Show something of another size, from its left and this height on.
  open(size, home) {
    Object.assign(this, { size, home });
    this.place(this.fits ? this.fitting : this.scale);
    this.toHome();
  }

  get fitting() {
    this.width = this.element.clientWidth;
    return clamp(this.room / this.size[0], [LEAST_FIT, 1]);
  }

  place(scale) {
    this.scale = scale;
    const [width, height] = this.size.map(length => length * scale);
    this.box.style.cssText = `width: ${width}px; height: ${height}px`;
    this.box.firstChild.style.transform = `scale(${scale})`;
    this.element.style.minHeight = `${Math.min(300, this.highest * scale)}px`;   // so that playing moves little
  }

  toHome() {
    this.element.scrollLeft = 0;
    this.element.scrollTop = this.home * this.scale + PADDING - this.element.clientHeight / 2;
  }

  fit() {
    this.fits = true;
    this.place(this.fitting);
    this.toHome();
  }

  // Another scale may take a scroll bar away, or bring one: that alone is no reason for yet another scale.
  resized() {
    if (this.fits && Math.abs(this.element.clientWidth - this.width) > BAR) this.place(this.fitting);
  }

  // Zoom by a factor.  What is at a place of the window, by default its middle, stays there.
  zoom(factor, x = this.element.clientWidth / 2, y = this.element.clientHeight / 2) {
    const { element } = this, before = this.scale;
    this.fits = false;
    this.place(clamp(before * factor, ZOOM));
    const by = this.scale / before;
    element.scrollLeft = (element.scrollLeft + x - PADDING) * by + PADDING - x;
    element.scrollTop = (element.scrollTop + y - PADDING) * by + PADDING - y;
  }

  // A place of the page, as a place of the window.
  within(x, y) {
    const { left, top } = this.element.getBoundingClientRect();
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
    const { element } = this, [x, y] = this.within(event.clientX, event.clientY);
    const onBar = x > element.clientWidth || y > element.clientHeight;
    if (event.pointerType !== "mouse" || event.button || onBar || event.target.closest(".chip")) return;
    const left = element.scrollLeft + event.clientX, top = element.scrollTop + event.clientY;
    const move = moved => element.scrollTo(left - moved.clientX, top - moved.clientY);
    element.setPointerCapture(event.pointerId);
    element.addEventListener("pointermove", move);
    element.addEventListener("lostpointercapture", () => element.removeEventListener("pointermove", move), { once: true });
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

  key(event) {
    if (modified(event)) return;
    const factor = { "+": FURTHER, "=": FURTHER, "-": 1 / FURTHER }[event.key];
    const by = { ArrowLeft: [-PAN, 0], ArrowRight: [PAN, 0], ArrowUp: [0, -PAN], ArrowDown: [0, PAN] }[event.key];
    if (factor) this.zoom(factor);
    else if (event.key === "0") this.fit();
    else if (by && event.target === this.element) this.element.scrollBy(...by);
    else return;
    taken(event);
  }
}
