// Opens a large report in headless Chromium and tells what it shows and how much it looked at for that, never how long it took.
// Arguments: the tools' directory, the page. Prints one JSON object; a failed step is an exception.
import { createRequire } from "node:module";

const [tools, path] = process.argv.slice(2);
const require = createRequire(`${tools}/package.json`);
const { chromium } = require("playwright-core");
const args = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", headless: true, args });
const found = { errors: [] };
try {
  const page = await browser.newPage({ viewport: { width: 1400, height: 900 } });
  page.on("pageerror", (error) => found.errors.push(error.message));
  await page.goto(`file://${path}`);
  await page.waitForSelector("#functions tbody tr");
  const drawn = () => page.evaluate(() => new Promise((done) => setTimeout(() => requestAnimationFrame(() => setTimeout(done, 0)), 20)));
  const text = (selector) => page.textContent(selector).then((text) => text.replaceAll("\u202f", ""));
  // What the page marks: entries that sums were made of, and boxes of the graph, of each time since the last look.
  const look = async () => {
    await drawn();
    const work = await page.evaluate(() => {
      const details = (name) => performance.getEntriesByName(name, "mark").map((mark) => mark.detail);
      const work = { sums: details("sums"), boxes: details("boxes") };
      performance.clearMarks();
      return work;
    });
    const rows = await page.locator("#functions tbody tr").evaluateAll((rows) => rows.map((row) => ({
      name: row.dataset.name, kind: row.dataset.kind,
      own: Number(row.querySelector("[data-what=own]").dataset.samples),
      total: Number(row.querySelector("[data-what=total]").dataset.samples),
    })));
    return { ...work, rows, status: await text("#status"), matched: await text("#matched") };
  };
  found.opened = await look();
  await page.fill("input[type=search]", "method_12");
  found.searched = await look();
  await page.click("#all");
  await look();
  await page.selectOption("#thread", { index: 3 });
  found.thread = await look();
  await page.click("#all");
  await page.fill("#from", "30");
  await page.press("#from", "Enter");
  await page.fill("#to", "60");
  await look();
  await page.press("#to", "Enter");
  found.range = await look();
  await page.click("#all");
  await look();
  // The pointer over the graph, then a click into it.
  const graph = await page.locator("#graph").boundingBox();
  for (const across of [30, 130, 230]) await page.mouse.move(graph.x + across, graph.y + 90);
  found.pointed = await look();
  await page.mouse.click(graph.x + 30, graph.y + 90);
  await page.waitForSelector("#details");
  found.zoomed = await look();
  found.painted = await page.$eval("#boxes", (canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    return new Uint32Array(data.buffer).filter((pixel) => pixel !== 0).length / (canvas.width * canvas.height);
  });
} finally {
  await browser.close();
}
console.log(JSON.stringify(found));
