// Drives reports with source text and of a comparison in headless Chromium. Arguments: the tools' directory, the page with source
// text, one without, one of a comparison, directory for screenshots. Prints one JSON object; a failed step is an exception.
import { createRequire } from "node:module";

const [tools, withSource, without, difference, shots] = process.argv.slice(2);
const require = createRequire(`${tools}/package.json`);
const { chromium } = require("playwright-core");
const args = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", headless: true, args });
const found = { errors: [], hacked: [], elements: [] };
const drawn = (page) => page.evaluate(() => new Promise((done) => setTimeout(() => requestAnimationFrame(() => setTimeout(done, 0)), 20)));
const open = async (path, table) => {
  const page = await browser.newPage({ viewport: { width: 1400, height: 900 }, colorScheme: "dark" });
  page.on("pageerror", (error) => found.errors.push(error.message));
  page.on("dialog", (dialog) => { found.errors.push(dialog.message()); dialog.dismiss(); });
  page.on("request", (request) => { if (!request.url().startsWith("file://")) found.errors.push(request.url()); });
  await page.goto(`file://${path}`);
  await page.waitForSelector(table);
  await drawn(page);
  return page;
};
const harmless = async (page) => {
  found.hacked.push(await page.evaluate(() => window.hacked ?? null));
  found.elements.push(await page.evaluate(() => [...document.querySelectorAll("script, img, iframe, object, embed, link")].map((element) => element.tagName)));
};
const source = (page) => page.locator("#source tbody tr").evaluateAll((rows) => rows.map((row) => [
  Number(row.dataset.line), Number(row.children[0].dataset.samples), Number(row.children[1].dataset.samples), row.querySelector(".code").textContent]));
const select = async (page) => {
  await page.locator("#functions .name button", { hasText: /^hot/ }).click();
  await page.waitForSelector("#details");
};
try {
  const page = await open(withSource, "#functions");
  await select(page);
  found.source = await source(page);
  found.marks = await page.locator("#source mark").evaluateAll((marks) => marks.map((mark) => [mark.textContent, Number(mark.dataset.own), Number(mark.dataset.total)]));
  await page.screenshot({ path: `${shots}/report-source.png` });
  await page.fill("#to", "0.1");
  await page.press("#to", "Enter");
  await drawn(page);
  found.filtered = await source(page);
  await harmless(page);
  // The whole file, from its hottest line; and one that has no text.
  await page.keyboard.press("Escape");
  await page.keyboard.press("2");
  await drawn(page);
  found.files = await page.locator("#files tr").evaluateAll((rows) => rows.map((row) => row.querySelector(".link").textContent));
  found.whole = await page.locator(".source-view #source tbody tr.seen").evaluateAll((rows) => rows.map((row) => Number(row.dataset.line)));
  await page.screenshot({ path: `${shots}/report-file.png` });
  const bare = await open(without, "#functions");
  await select(bare);
  found.no_source = await bare.textContent("#no-source");

  const changed = await open(difference, "#changes");
  found.verdict = await changed.textContent("#answer");
  found.changes = await changed.locator("#changes tbody tr").evaluateAll((rows) => rows.map((row) => [
    row.dataset.name, row.children[1].textContent, row.children[2].textContent, row.dataset.significant]));
  await changed.screenshot({ path: `${shots}/report-difference.png` });
  found.colours = await changed.$eval("#boxes", (canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let red = false, blue = false;
    for (let i = 0; i < data.length; i += 4) {
      if (data[i + 3] < 255) continue;
      red ||= data[i] > data[i + 2] + 40;
      blue ||= data[i + 2] > data[i] + 40;
    }
    return [red, blue];
  });
  // Into the stack: the widest call of the module.
  await changed.focus("#boxes");
  for (const key of ["ArrowDown", "ArrowDown", "ArrowRight"]) {
    await changed.keyboard.press(key);
    await drawn(changed);
  }
  found.status = await changed.textContent("#status");
  await changed.keyboard.press("/");
  await changed.keyboard.type("^same");
  await drawn(changed);
  found.searched = await changed.locator("#changes tbody tr").evaluateAll((rows) => rows.map((row) => row.dataset.name));
  // Who calls it, on both sides.
  await changed.locator("#changes .link").first().click();
  await changed.waitForSelector("#details");
  const edges = (id) => changed.locator(`#${id} tbody tr`).evaluateAll((rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent)));
  found.callers = await edges("callers");
  await changed.locator("#callers .link").first().click();
  await drawn(changed);
  found.callees = await edges("callees");
  await harmless(changed);
} finally {
  await browser.close();
}
console.log(JSON.stringify(found));
