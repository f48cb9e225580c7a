// Where displays are put, and whether they are light or dark.

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

// Draw into an element that stands for the display until then.
function mount(host, style, model) {
  const shown = model.sides ? new Pair(model) : new Display(model);
  host.textContent = "";
  host.attachShadow({ mode: "open" }).append(el("style", {}, style), shown.root);
  shown.draw();
  followTheme(host);
}

// Fill the elements with this id that are empty still; a notebook may show one result twice.
function fillAll(id, style, model) {
  for (const host of document.querySelectorAll(`[id="${id}"]`)) {
    if (host.shadowRoot) continue;
    host.setAttribute("data-lm-suppress-shortcuts", "true");   // to JupyterLab: keys are ours while the focus is inside
    mount(host, style, model);
  }
}
