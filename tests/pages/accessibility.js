// Looks over the page that is open and returns what would keep somebody from using it, one sentence each.
// Run as the body of a function; arguments[0]: whether the screen is a phone.
const phone = arguments[0];
const found = [];
const shown = (node) => node.checkVisibility({ checkOpacity: false, checkVisibilityCSS: true });
const say = (node, text) => found.push(`${text}: ${node.outerHTML.slice(0, 140)}`);
const byIds = (ids) => ids.split(/\s+/).filter(Boolean).map((id) => document.getElementById(id));

function nameOf(node) {
  if (node.hasAttribute("aria-labelledby")) return byIds(node.getAttribute("aria-labelledby")).map((n) => n && n.textContent).join(" ").trim();
  if (node.getAttribute("aria-label")) return node.getAttribute("aria-label").trim();
  if (node.labels && node.labels.length) return [...node.labels].map((label) => label.textContent).join(" ").trim();
  const title = node.querySelector(":scope > title");
  if (title) return title.textContent.trim();
  const copy = node.cloneNode(true);
  copy.querySelectorAll("[aria-hidden=true]").forEach((hidden) => hidden.remove());
  return copy.textContent.trim();
}

// Structure
if (!document.documentElement.lang) found.push("the page has no language");
if (!document.title.trim()) found.push("the page has no title");
if (document.querySelectorAll("main").length !== 1) found.push("not exactly one main");
const headings = [...document.querySelectorAll("h1,h2,h3,h4")].filter(shown);
if (headings.filter((h) => h.tagName === "H1").length !== 1) found.push("not exactly one h1");
headings.reduce((before, heading) => {
  const level = Number(heading.tagName[1]);
  if (level > before + 1) say(heading, "a heading skips a level");
  return level;
}, 0);
const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
for (const id of new Set(ids.filter((one, at) => ids.indexOf(one) !== at))) found.push(`the id ${id} is there twice`);
for (const attribute of ["aria-labelledby", "aria-describedby", "for", "list"]) {
  for (const node of document.querySelectorAll(`[${attribute}]`)) {
    if (byIds(node.getAttribute(attribute)).some((one) => !one)) say(node, `${attribute} names nothing`);
  }
}
for (const table of document.querySelectorAll("table")) {
  if (!table.caption) say(table, "a table has no caption");
  if (table.querySelector("th:not([scope])")) say(table, "a table's heading has no scope");
}
for (const link of document.querySelectorAll("a[href^='#']")) {
  if (!document.getElementById(link.hash.slice(1))) say(link, "a link leads to no place");
}

// Names
for (const node of document.querySelectorAll("a[href],button,input:not([type=hidden]),select,textarea,summary,[role=img],[role=progressbar],[role=group],nav,section")) {
  if (shown(node) && !nameOf(node)) say(node, "no name");
}
for (const node of document.querySelectorAll("svg:not([role])")) {
  if (node.getAttribute("aria-hidden") !== "true") say(node, "a picture is neither named nor hidden");
}
for (const node of document.querySelectorAll("[tabindex]")) {
  if (node.tabIndex > 0) say(node, "tabindex breaks the order");
}

// Colours
const parse = (text) => {
  const parts = text.match(/[\d.]+/g).map(Number);
  return text.startsWith("color(srgb") ? [parts[0] * 255, parts[1] * 255, parts[2] * 255, parts[3] ?? 1] : [parts[0], parts[1], parts[2], parts[3] ?? 1];
};
const over = (top, under) => [0, 1, 2].map((at) => top[at] * top[3] + under[at] * (1 - top[3])).concat(1);
const light = (colour) => {
  const [r, g, b] = colour.slice(0, 3).map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ratio = (one, two) => {
  const [high, low] = [light(one), light(two)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
};
function ground(node) {
  const layers = [];
  for (let at = node; at; at = at.parentElement) {
    const colour = parse(getComputedStyle(at).backgroundColor);
    if (colour[3] > 0) layers.push(colour);
    if (colour[3] === 1) break;
  }
  return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
}
function fillBehind(label) {
  const rect = label.previousElementSibling;
  const fill = getComputedStyle(rect).fill;
  if (!fill.startsWith("url(")) return parse(fill);
  const pattern = document.querySelector(fill.match(/#[\w-]+/)[0]);
  return parse(getComputedStyle(pattern.firstElementChild).fill);
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const judged = new Set();
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || judged.has(node) || !shown(node)) continue;
  if (node.closest("title, script, style, noscript, datalist, option, .skip, .visually-hidden")) continue;
  judged.add(node);
  const style = getComputedStyle(node);
  const drawn = node instanceof SVGElement;
  const behind = drawn && node.matches(".gate-label") ? fillBehind(node) : ground(drawn ? node.closest("figure") : node);
  const text = over(parse(drawn ? style.fill : style.color), behind);
  const size = parseFloat(style.fontSize);
  const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
  if (ratio(text, behind) < (large ? 3 : 4.5)) say(node, `contrast ${ratio(text, behind).toFixed(2)}`);
}

// Room
// A phone widens innerWidth to what does not fit.
const room = phone ? Math.min(innerWidth, screen.width) : innerWidth;
if (document.scrollingElement.scrollWidth > room) found.push(`the page is ${document.scrollingElement.scrollWidth} wide on a screen of ${room}`);
for (const node of document.querySelectorAll("button, .button, summary, input:not([type=hidden]), nav a")) {
  const box = node.getBoundingClientRect();
  const target = node.labels && node.labels[0] ? node.labels[0].getBoundingClientRect() : box;
  const height = Math.max(box.height, target.height);
  if (shown(node) && !node.matches(".crumbs a") && height < (phone ? 24 : 20)) say(node, `only ${height} high`);
}
return found;
