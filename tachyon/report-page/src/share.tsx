// What can be taken from the page into a pull request: the numbers as Markdown, the graph as a picture, a link.

import { useRef, useState } from "preact/hooks";
import { facts, whatSamplesAre } from "./headline";
import type { Model, Row, Sums } from "./model";
import { about, percent } from "./words";

/** Rows of the table. */
const ROWS = 10;

/** Text as a Markdown table shows it as it is. */
function code(text: string): string {
  const fence = "`".repeat(1 + Math.max(0, ...[...text.matchAll(/`+/g)].map(([run]) => run.length)));
  const space = fence.length > 1 ? " " : "";
  return `${fence}${space}${text.replaceAll("|", "\\|")}${space}${fence}`;
}

/** The answer and the hottest functions. */
export function markdown(model: Model, sums: Sums, rows: Row[], filtered: boolean, title: string): string {
  const python = rows.filter((row) => !model.isMachine(row.func) && row.own > 0).sort((a, b) => b.own - a.own).slice(0, ROWS);
  const hottest = model.hottest(sums);
  const place = (row: Row) => {
    const line = hottest[row.func], file = model.place(row.func);
    return file ? code(line ? `${file}:${line}` : file) : "";
  };
  const [first] = python;
  const lead = first ? [`**${about(first.own, sums.samples)}** ${whatSamplesAre(model)}${filtered ? " chosen" : ""} is in ${code(model.name(first.func))}.`, ""] : [];
  return [
    `${code(title)}: ${facts(model, sums, filtered).join("; ")}.`, "", ...lead,
    "| self | total | function | file |", "| ---: | ---: | --- | --- |",
    ...python.map((row) => `| ${percent(row.own, sums.samples)} | ${percent(row.total, sums.samples)} | ${code(model.name(row.func))} | ${place(row)} |`),
  ].join("\n");
}

export function Share({ text }: { text(): string }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const area = useRef<HTMLTextAreaElement>(null);
  const [said, say] = useState("");
  const copy = (what: string, text: string) => {
    // Without a clipboard the text is there to be copied by hand.
    const failed = () => { say("select the text and copy it"); area.current!.select(); };
    if (!navigator.clipboard) failed();
    else navigator.clipboard.writeText(text).then(() => say(`${what} copied`), failed);
  };
  const picture = () => {
    const canvas = document.querySelector<HTMLCanvasElement>("#boxes");
    canvas?.toBlob((blob) => {
      if (!blob) return;
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = "flame-graph.png";
      link.click();
      URL.revokeObjectURL(link.href);
    });
  };
  return (
    <>
      <button id="share" title="as Markdown, as a picture, as a link" onClick={() => { area.current!.value = text(); say(""); dialog.current?.showModal(); }}>Share</button>
      <dialog ref={dialog} class="share" aria-label="share">
        <textarea ref={area} id="markdown" readOnly rows={14} cols={80} aria-label="summary as Markdown" />
        <form method="dialog">
          <output>{said}</output>
          <button type="button" onClick={() => copy("Markdown", area.current!.value)}>Copy Markdown</button>
          <button type="button" onClick={() => copy("link", location.href)}>Copy link to this view</button>
          <button type="button" onClick={picture}>Save graph as PNG</button>
          <button>Close</button>
        </form>
      </dialog>
    </>
  );
}
