// Elements, text, figures and events: what all other parts use.
//
// What comes from the description reaches the document as text nodes, through `el`: no markup is ever made from it.

const STEP_MS = 1100;   // of a round, while playing
const SVG = "http://www.w3.org/2000/svg";

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
