// Drives the HTML report in headless Chromium. Arguments: the tools' directory, the page, one of hostile names, one of waits and
// tasks, directory for screenshots. Prints one JSON object; a failed step is an exception.
import { createServer } from "node:http";
import { createRequire } from "node:module";

const [tools, path, hostile, waiting, shots] = process.argv.slice(2);
const require = createRequire(`${tools}/package.json`);
const { chromium } = require("playwright-core");
const args = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", headless: true, args });
const found = { errors: [], requests: [], themes: [] };
// Somebody to call, whom no call may reach.
const server = createServer((request, response) => { found.requests.push(`received ${request.url}`); response.end(); });
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));
const elsewhere = `http://127.0.0.1:${server.address().port}/x`;
// Once everything that follows from an event is drawn.
const drawn = (page) => page.evaluate(() => new Promise((done) => setTimeout(() => requestAnimationFrame(() => setTimeout(done, 0)), 20)));
const open = async (path, fragment = "") => {
  const page = await browser.newPage({ viewport: { width: 1400, height: 900 }, colorScheme: "dark" });
  page.on("pageerror", (error) => found.errors.push(error.message));
  page.on("dialog", (dialog) => { found.errors.push(dialog.message()); dialog.dismiss(); });
  page.on("request", (request) => { if (!request.url().startsWith("file://") && request.url() !== elsewhere) found.requests.push(request.url()); });
  await page.goto(`file://${path}${fragment}`);
  await page.waitForSelector("#functions");
  await drawn(page);
  return page;
};
const rows = (page) => page.locator("#functions tbody tr").evaluateAll((rows) => rows.map((row) => ({
  name: row.dataset.name, kind: row.dataset.kind,
  own: Number(row.querySelector("[data-what=own]").dataset.samples),
  total: Number(row.querySelector("[data-what=total]").dataset.samples),
})));
const edges = (page, id) => page.locator(`#${id} tbody tr`).evaluateAll((rows) => rows.map((row) => ({
  name: row.dataset.name, samples: Number(row.querySelector(".share").dataset.samples),
})));
const text = (page, selector) => page.textContent(selector).then((text) => text.replaceAll("\u202f", ""));
const chosen = async (page) => {
  const facts = await page.locator("#answer .facts > span").allTextContents();
  return facts.map((fact) => /^\d+ samples/.exec(fact.replaceAll("\u202f", ""))).find((found) => found)[0];
};
const picture = (page) => page.$eval("#boxes", (canvas) => canvas.toDataURL());
try {
  const page = await open(path);
  found.themes.push(await page.evaluate(() => document.documentElement.dataset.theme));
  await page.keyboard.press("t");
  await drawn(page);
  found.themes.push(await page.evaluate(() => document.documentElement.dataset.theme));
  found.caption = await text(page, "#caption");
  found.folded = await rows(page);
  found.answer = await text(page, "#answer");
  await page.screenshot({ path: `${shots}/report.png` });
  await page.click("#native-rows");
  await drawn(page);
  found.native = await rows(page);
  await page.click("#native-rows");
  await page.click("#native");
  await drawn(page);
  found.without = await rows(page);
  await page.click("#native");

  await page.locator("#functions .name button", { hasText: /^leaf/ }).click();
  await page.waitForSelector("#details");
  found.callers = await edges(page, "callers");
  found.callees = await edges(page, "callees");
  found.lines = await page.locator("#lines tbody tr").evaluateAll((rows) => rows.map((row) => [
    Number(row.children[0].dataset.samples), Number(row.children[1].dataset.samples), row.children[2].textContent]));
  await page.click("#share");
  found.markdown = await page.inputValue("#markdown");
  await page.keyboard.press("Escape");

  await page.keyboard.press("/");
  await page.keyboard.type("^LEAF".toLowerCase());
  await drawn(page);
  found.matched = await text(page, "#matched");
  found.searched = await rows(page);
  await page.fill("input[type=search]", "");
  await page.selectOption("#thread", { label: "worker (tid 78)" });
  await drawn(page);
  found.worker = await rows(page);
  found.worker_status = await text(page, "#status");
  await page.selectOption("#thread", { label: "all 2 threads" });
  await page.selectOption("#module", { label: "libz.so.1" });
  await drawn(page);
  found.module = await rows(page);
  await page.selectOption("#module", { label: "all modules" });

  // A range by its numbers, then by the pointer.
  await page.fill("#from", "0.25");
  await page.press("#from", "Enter");
  await page.fill("#to", "0.5");
  await page.press("#to", "Enter");
  await drawn(page);
  found.quarter = await chosen(page);
  found.quarter_status = await text(page, "#status");
  await page.click("#whole-time");
  await drawn(page);
  const over = await page.locator("#time-line .u-over").boundingBox();
  await page.mouse.move(over.x + over.width * 0.3, over.y + 20);
  await page.mouse.down();
  await page.mouse.move(over.x + over.width * 0.6, over.y + 20, { steps: 5 });
  await page.mouse.up();
  await drawn(page);
  found.dragged = { from: await page.inputValue("#from"), to: await page.inputValue("#to"), answer: await chosen(page) };
  await page.screenshot({ path: `${shots}/report-brushed.png` });
  await page.click("#all");

  await page.keyboard.press("f");
  await page.focus("#boxes");
  await drawn(page);
  found.unzoomed = await picture(page);
  for (const key of ["ArrowUp", "ArrowUp"]) {
    await page.keyboard.press(key);
    await drawn(page);
  }
  found.walked = await text(page, "#status");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => location.hash.includes("zoom="));
  await page.evaluate(() => document.activeElement.blur());
  await page.mouse.move(2, 2);
  found.link = await page.evaluate(() => location.hash);
  const same = await open(path, found.link);
  await same.keyboard.press("t");
  await same.evaluate(() => dispatchEvent(new Event("resize")));
  const bare = async (page) => {
    // Without the frame around the box that the keyboard was on.
    await page.reload();
    await page.waitForSelector("#functions");
    await drawn(page);
    return picture(page);
  };
  found.zoomed = await bare(page);
  found.linked = await bare(same);
  await same.keyboard.press("v");
  await same.focus("#boxes");
  await same.keyboard.press("ArrowDown");
  await drawn(same);
  found.inverted = await text(same, "#status");
  await same.emulateMedia({ media: "print" });
  await same.screenshot({ path: `${shots}/report-print.png` });

  // Waits by what they are for, and whose work it was.
  const idle = await open(waiting);
  found.waits = { rows: await rows(idle), answer: await text(idle, "#answer") };
  found.waits.legend = Object.fromEntries(await idle.locator(".state").evaluateAll((states) => states.map((state) => [state.textContent.trim(), state.dataset.state])));
  await idle.click(`.state >> text=lock`);
  await drawn(idle);
  found.waits.lock = await rows(idle);
  await idle.keyboard.press("a");
  await idle.keyboard.press("3");
  await drawn(idle);
  found.waits.tasks = await idle.locator("#tasks tbody tr").evaluateAll((rows) => rows.map((row) => [
    row.dataset.name, Number(row.children[0].dataset.samples), Number(row.children[1].dataset.samples)]));
  found.waits.lanes = await idle.locator("#lanes .lane").evaluateAll((lanes) => lanes.map((lane) => lane.querySelector("button").textContent));
  found.waits.drawn = await idle.locator("#lanes canvas").evaluateAll((all) => all.map((canvas) =>
    canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((byte) => byte > 0)));
  await idle.locator("#tasks .link", { hasText: "fetch-a" }).click();
  await drawn(idle);
  found.waits.fetch = await rows(idle);
  found.waits.link = await idle.waitForFunction(() => location.hash.includes("task=") && location.hash).then((hash) => hash.jsonValue());
  await idle.screenshot({ path: `${shots}/report-waits.png` });
  found.waits.linked = await rows(await open(waiting, found.waits.link));

  // With the keyboard alone: from the top to the hottest function, and back.
  const keys = await open(path);
  const focused = () => keys.evaluate(() => document.activeElement.closest("tr")?.dataset.name ?? document.activeElement.id);
  found.stops = [];
  for (let step = 0; step < 60; step++) {
    await keys.keyboard.press("Tab");
    const at = await focused();
    if (at) found.stops.push(at);
    if (at === "leaf (app.py)") break;
  }
  await keys.keyboard.press("Enter");
  await drawn(keys);
  found.opened = await keys.textContent("#details h2 code");
  await keys.keyboard.press("Escape");
  await drawn(keys);
  found.closed = await keys.locator("#details").count();

  // The answer is there without the script.
  const plain = await browser.newPage({ javaScriptEnabled: false });
  await plain.goto(`file://${path}`);
  found.plain = (await plain.textContent("#app")).replace(/\s+/g, " ").trim();

  const odd = await open(hostile);
  for (const key of ["f", "v", "c", "c", "n", "n", "2", "3", "1"]) {
    await odd.keyboard.press(key);
    await drawn(odd);
  }
  await odd.click("#native-rows");
  found.hostile = await rows(odd);
  for (let place = 0; place < found.hostile.length; place++) {
    await odd.locator("#functions .name button").nth(place).click();
    await drawn(odd);
  }
  await odd.screenshot({ path: `${shots}/report-hostile.png` });
  found.hacked = await odd.evaluate(() => window.hacked ?? null);
  found.elements = await odd.evaluate(() =>
    [...document.querySelectorAll("script, img, iframe, object, embed, link, b > script")].map((element) => element.tagName));
  found.forbidden = await odd.evaluate(async (elsewhere) => {
    const names = [];
    addEventListener("securitypolicyviolation", (event) => names.push(event.effectiveDirective));
    const told = (count) => new Promise((done) => { const look = () => (names.length >= count ? done() : setTimeout(look, 5)); look(); });
    const image = document.createElement("img");
    image.src = elsewhere;
    await told(1);
    const script = document.createElement("script");
    script.append("window.hacked = 1");
    try { document.body.append(script); } catch { /* It must. */ }
    await told(2);
    await fetch(elsewhere).catch(() => {});
    await told(3);
    try { document.body.innerHTML = "<b>x</b>"; } catch { /* It must. */ }
    await told(4);
    return names;
  }, elsewhere);
} finally {
  await browser.close();
  server.close();
}
console.log(JSON.stringify(found));
