// Drives the HTML report in headless Chromium. Arguments: the tools' directory, the page, one of hostile names, directory
// for screenshots. Prints one JSON object; a failed step is an exception.
import { createServer } from "node:http";
import { createRequire } from "node:module";

const [tools, path, hostile, shots] = process.argv.slice(2);
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
  name: row.querySelector(".name").textContent, kind: row.dataset.kind,
  own: Number(row.querySelector("[data-what=own]").dataset.samples),
  total: Number(row.querySelector("[data-what=total]").dataset.samples),
})));
const edges = (page, id) => page.locator(`#${id} tr`).evaluateAll((rows) => rows.map((row) => ({
  name: row.querySelector(".name").textContent, samples: Number(row.querySelector(".share").dataset.samples),
})));
const text = (page, selector) => page.textContent(selector).then((text) => text.replaceAll("\u202f", ""));
const chosen = async (page) => (await text(page, "#answer")).split(",")[0];
const picture = (page) => page.$eval("#boxes", (canvas) => canvas.toDataURL());
try {
  const page = await open(path);
  found.themes.push(await page.evaluate(() => document.documentElement.dataset.theme));
  await page.keyboard.press("t");
  await drawn(page);
  found.themes.push(await page.evaluate(() => document.documentElement.dataset.theme));
  found.caption = await text(page, "#caption");
  found.native = await rows(page);
  await page.screenshot({ path: `${shots}/report.png` });
  await page.click("#native");
  await drawn(page);
  found.folded = await rows(page);
  found.answer = await text(page, "#answer");
  await page.click("#native");

  await page.locator("#functions .name button", { hasText: /^leaf/ }).click();
  await page.waitForSelector("#details");
  found.callers = await edges(page, "callers");
  found.callees = await edges(page, "callees");
  found.lines = await page.locator("#lines tbody tr").evaluateAll((rows) => rows.map((row) => [
    Number(row.children[0].dataset.samples), Number(row.children[1].dataset.samples), row.children[2].textContent]));

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
  await page.selectOption("#thread", { label: "all threads" });
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

  const odd = await open(hostile);
  for (const key of ["f", "v", "c", "c", "n", "n"]) {
    await odd.keyboard.press(key);
    await drawn(odd);
  }
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
