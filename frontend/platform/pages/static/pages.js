// What the pages do beyond plain HTML: refresh their live parts, preview settings, show times in the reader's zone.
// Everything works without this file; it only saves reloads.
"use strict";

const LIVE_HEADERS = { "X-Live": "1" };
const MAX_PAUSE_S = 30;
const PREVIEW_DELAY_MS = 300;
const PREVIEW_AGAIN_MS = 3000;
const PREVIEW_TRIES = 10;

document.documentElement.classList.add("scripted");

function localTimes(root) {
  const format = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  for (const time of root.querySelectorAll("time[data-moment]")) {
    const at = new Date(time.dateTime);
    if (!Number.isNaN(at.getTime())) {
      time.title = time.textContent;
      time.textContent = format.format(at);
    }
  }
}

// Replace the content of a part, keeping what the reader has opened and where the keyboard is.
function replacePart(part, html) {
  const parsed = new DOMParser().parseFromString(html, "text/html");
  localTimes(parsed);
  for (const open of part.querySelectorAll("details[open][id]")) {
    const same = parsed.getElementById(open.id);
    if (same) same.open = true;
  }
  const focused = part !== document.activeElement && part.contains(document.activeElement) && document.activeElement;
  const heir = focused && heirOf(focused, part, parsed.body);
  const scrolled = [...part.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  part.replaceChildren(...parsed.body.childNodes);
  part.querySelectorAll(".scroll").forEach((box, index) => { box.scrollLeft = scrolled[index] || 0; });
  if (heir) heir.focus({ preventScroll: true });
  if (focused && !part.contains(document.activeElement)) {
    // What had it is gone: the next tabulator begins with this part, not with the page.
    part.tabIndex = -1;
    part.focus({ preventScroll: true });
  }
}

// What takes the place of an element. Rows come and go above it, so counting from the top could end in the actions of
// something else: it is looked for in what has the same id, and a link by where it leads.
function heirOf(node, part, fresh) {
  const named = node.closest("[id]");
  const known = named !== part && part.contains(named);
  const before = known ? named : part;
  const after = known ? fresh.querySelector("#" + CSS.escape(named.id)) : fresh;
  const href = node.getAttribute("href");
  if (!after || node === before) return after;
  if (href === null) return followPath(after, pathTo(before, node));
  const same = `[href="${CSS.escape(href)}"]`;
  return after.querySelectorAll(same)[[...before.querySelectorAll(same)].indexOf(node)];
}

// Whoever marks text to copy it must not lose it to an update; nor the click whoever has just pressed the button.
function isInHand(part) {
  const marked = document.getSelection();
  return (marked && !marked.isCollapsed && part.contains(marked.anchorNode)) || part.querySelector(":active") !== null;
}

function pathTo(root, node) {
  const path = [];
  for (; node !== root; node = node.parentElement) path.unshift([...node.parentElement.children].indexOf(node));
  return path;
}

function followPath(root, path) {
  return path.reduce((node, index) => node && node.children[index], root);
}

function announce(part) {
  const said = part.querySelector("[data-announce]");
  const text = said ? said.dataset.announce : "";
  const before = part.dataset.said;
  part.dataset.said = text;
  // Only what changed, and never the first state: that is on the page already.
  if (before !== undefined && text && text !== before) document.getElementById("announcer").textContent = text;
}

function trouble(text, href) {
  let bar = document.getElementById("trouble");
  if (!text) {
    if (bar) bar.remove();
    return;
  }
  if (!bar) {
    bar = document.createElement("div");
    bar.id = "trouble";
    bar.className = "trouble";
    bar.setAttribute("role", "alert");
    document.body.append(bar);
  }
  if (bar.dataset.text === text) return;
  bar.dataset.text = text;
  bar.replaceChildren(text + " ");
  if (href) {
    const link = document.createElement("a");
    link.href = href;
    link.textContent = "Sign in again";
    bar.append(link);
  }
}

class LivePart {
  constructor(part) {
    this.part = part;
    this.url = part.dataset.live;
    this.seconds = Number(part.dataset.seconds);
    this.failures = 0;
    this.timer = 0;
    this.last = "";
    announce(part);
    document.addEventListener("visibilitychange", () => this.look());
    this.schedule();
  }

  // Back in view: at once, since what is shown may be hours old.
  look() {
    clearTimeout(this.timer);
    if (document.visibilityState === "visible") this.refresh();
  }

  schedule() {
    clearTimeout(this.timer);
    if (document.visibilityState !== "visible" || this.ended) return;
    const pause = Math.min(this.seconds * 2 ** this.failures, Math.max(MAX_PAUSE_S, this.seconds));
    this.timer = setTimeout(() => this.refresh(), pause * 1000);
  }

  async refresh() {
    if (this.busy || this.ended) return;
    this.busy = true;
    try {
      const answer = await fetch(this.url, { headers: LIVE_HEADERS, redirect: "error", signal: AbortSignal.timeout(10000) });
      if (answer.status === 401) {
        this.ended = true;
        trouble("You have been signed out.", location.href);
        return;
      }
      if (!answer.ok) throw new Error(String(answer.status));
      const html = await answer.text();
      if (html !== this.last && !isInHand(this.part)) {
        replacePart(this.part, html);
        this.last = html;
      }
      this.failures = 0;
      trouble("");
      announce(this.part);
    } catch {
      this.failures = Math.min(this.failures + 1, 6);
      if (this.failures > 1) trouble("No connection to the server; the values shown are old. Trying again…");
    } finally {
      this.busy = false;
      this.schedule();
    }
  }
}

function previewWhileTyping(form) {
  const box = document.getElementById("preview");
  let timer = 0;
  let asked = 0;
  let patience = PREVIEW_TRIES;
  const ask = async () => {
    const turn = ++asked;
    const body = new URLSearchParams(new FormData(form));
    try {
      const answer = await fetch(form.dataset.preview, { method: "POST", body, headers: LIVE_HEADERS, redirect: "error" });
      const html = await answer.text();
      if (turn !== asked || !answer.ok) return;
      replacePart(box, html);
      askAgain();
    } catch {
      // The button of the form still previews, and Save checks everything again.
    }
  };
  // What takes long is made meanwhile, for whoever asks next.
  const askAgain = () => {
    if (!box.querySelector("[data-again]") || --patience < 0) return;
    clearTimeout(timer);
    timer = setTimeout(ask, PREVIEW_AGAIN_MS);
  };
  askAgain();
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(ask, PREVIEW_DELAY_MS);
  });
  // It would be what Enter presses, being the first of the form; hidden or not.
  form.querySelectorAll(".no-script").forEach((button) => button.remove());
  const zone = form.querySelector("[data-browser-zone]");
  const own = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (zone && own) zone.value = own;
}

// Spans of the gate have titles, which neither touch screens nor narrow bars let anybody read.
function readChart(event) {
  const plot = event.target.closest && event.target.closest(".plot");
  if (!plot) return;
  const hit = [...plot.querySelectorAll("g > .gate")].find((bar) => {
    const box = bar.getBoundingClientRect();
    return event.clientX >= box.left && event.clientX <= box.right;
  });
  const said = plot.closest("figure").querySelector(".chart-said");
  if (hit && said) said.textContent = hit.parentElement.querySelector("title").textContent;
}

// A menu closes when the reader turns to something else.
function closeMenus(event) {
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (event.type === "keydown" ? event.key === "Escape" : !menu.contains(event.target)) {
      menu.open = false;
      if (event.type === "keydown") menu.querySelector("summary").focus();
    }
  }
}

localTimes(document);
// A bar of names wider than the screen shows the one of this page.
document.querySelectorAll(".bar [aria-current]").forEach((name) => name.scrollIntoView({ inline: "nearest", block: "nearest" }));
// A chart wider than the screen begins with now.
document.querySelectorAll(".chart > .scroll").forEach((box) => { box.scrollLeft = box.scrollWidth; });
document.querySelectorAll("[data-live]").forEach((part) => new LivePart(part));
document.querySelectorAll("form[data-preview]").forEach(previewWhileTyping);
document.addEventListener("click", readChart);
document.addEventListener("click", closeMenus);
document.addEventListener("keydown", closeMenus);
