// Makes the pages: the HTML report, and the fleet's overview; one file each, in which the programs put their data. Argument: the directory to write to.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";

const bundle = async (entry, loader) => {
  const { outputFiles: [file] } = await build({
    entryPoints: [entry], bundle: true, minify: true, write: false, charset: "utf8", target: "es2022", format: "iife",
    legalComments: "none", jsx: "automatic", jsxImportSource: "preact", loader,
  });
  return file.text.trim();
};
const hash = (text) => `sha256-${createHash("sha256").update(text).digest("base64")}`;
const licence = (name) => {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  return `${name} ${version}: ${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}`;
};
const make = async (script_file, style_file, page_file, out) => {
  const script = await bundle(script_file, {});
  const style = await bundle(style_file, {});
  const parts = {
    script, style,
    "script-hash": hash(script),
    "style-hash": hash(style),
    licences: ["preact", "uplot"].map(licence).join("\n\n"),
  };
  for (const [name, text] of Object.entries(parts)) {
    if (text.includes("@@")) throw new Error(`${name} has the mark of a place in it`);
    if (/<\/(script|style)|<!--/i.test(text) || (name === "licences" && text.includes("--"))) throw new Error(`${name} would end its element`);
  }
  // Each place is named once, so nothing that was put in is looked at again.
  const text = ["src/head.html", page_file].map((file) => readFileSync(file, "utf8")).join("");
  const page = text.replace(/\{\{([a-z-]+)\}\}/g, (_, name) => parts[name]);
  writeFileSync(`${process.argv[2]}/${out}`, page);
};
await make("src/app.tsx", "src/style.css", "src/page.html", "report.html");
await make("src/fleet.tsx", "src/fleet.css", "src/fleet.html", "fleet.html");
