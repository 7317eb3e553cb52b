// The source text of one function, with self and total heat by line, and by column where it is known.

import { useMemo } from "preact/hooks";
import type { LineRow, Mark, Model } from "./model";
import { count, percent } from "./words";

/** Control characters, and those that change the order in which others are shown. */
const UNSAFE = /[\p{Cc}\p{Cf}\u2028\u2029]/gu;

export function shown(text: string): string {
  return text.replaceAll("\t", "    ").replace(UNSAFE, (character) => `\\u{${character.codePointAt(0)!.toString(16)}}`);
}

/** How hot, in percent of a full colour: also what is rare can be seen. */
function heat(part: number, whole: number): number {
  return part <= 0 ? 0 : Math.round(8 + 72 * Math.sqrt(Math.min(1, part / Math.max(1, whole))));
}

interface Piece { text: string; mark: Mark | null }

/** A line in pieces, each with the narrowest part that it lies in. Columns are UTF-8 bytes. */
export function pieces(text: string, marks: Mark[]): Piece[] {
  const characters = [...text];
  const of: (Mark | null)[] = new Array<Mark | null>(characters.length).fill(null);
  const starts: number[] = [];
  let bytes = 0;
  for (const character of characters) {
    starts.push(bytes);
    const point = character.codePointAt(0)!;
    bytes += point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
  }
  const end = (mark: Mark) => (mark.to < 0 ? bytes : mark.to);
  for (const mark of [...marks].sort((a, b) => (end(b) - b.from) - (end(a) - a.from)))
    starts.forEach((start, index) => { if (start >= mark.from && start < end(mark)) of[index] = mark; });
  const found: Piece[] = [];
  characters.forEach((character, index) => {
    const last = found[found.length - 1];
    if (last && last.mark === of[index]) last.text += character;
    else found.push({ text: character, mark: of[index]! });
  });
  return found;
}

type Line = [number: number, text: string, seen?: LineRow];

/** A function's own lines of those that a file has here, in runs. */
function ofFunction(all: [number, string][], seen: LineRow[], name: string): Line[][] {
  const rows = new Map(seen.map((line) => [line.line, line]));
  const numbers = seen.map((line) => line.line).filter((line) => line > 0);
  const first = Math.min(...numbers), last = Math.max(...numbers);
  const indentation = (text: string) => text.length - text.trimStart().length;
  const own = name.slice(name.lastIndexOf(".") + 1);
  const isHead = (text: string) => /^\s*(async\s+def|def|class)\s/.test(text) &&
    text.trimStart().replace(/^(async\s+def|def|class)\s+/, "").split(/[^\p{L}\p{N}_]/u)[0] === own;
  let from = -1, to = all.length;
  all.forEach(([number, text], index) => { if (number <= first && isHead(text)) from = index; });
  if (from >= 0) {
    const outer = indentation(all[from]![1]);
    to = all.findIndex(([number, text]) => number > last && text.trim() !== "" && indentation(text) <= outer && !/^[)\]}]/.test(text.trimStart()));
    if (to < 0) to = all.length;
    while (from > 0 && all[from - 1]![1].trimStart().startsWith("@")) from--;
    while (to > from && all[to - 1]![1].trim() === "") to--;
  }
  const near = (line: number) => from >= 0 || numbers.some((seen) => Math.abs(seen - line) <= 4);
  const runs: Line[][] = [];
  all.slice(Math.max(0, from), to).forEach(([number, text]) => {
    if (!near(number)) return;
    const run = runs[runs.length - 1];
    const line: Line = [number, text, rows.get(number)];
    if (run && run[run.length - 1]![0] + 1 === number) run.push(line);
    else runs.push([line]);
  });
  return runs.some((run) => run.some((line) => line[2])) ? runs : [];
}

export function hasSource(model: Model, func: number): boolean {
  const { source, functions } = model.data.document;
  return source?.files.some((found) => found.file === functions.file[func]) ?? false;
}

const ASK = "not in this file: record with -o report.html --source, or tachyon-bpf export FILE.tach -o report.html --source on a machine that has the files";

export function Source({ model, func, lines, samples }: { model: Model; func: number; lines: LineRow[]; samples: number }) {
  const { source, functions } = model.data.document;
  const file = functions.file[func]!;
  const text = useMemo(() => source?.files.find((found) => found.file === file), [source, file]);
  const rows = useMemo(() => (text ? ofFunction(text.lines, lines, model.name(func)) : []), [text, lines, func]);
  if (!text || rows.length === 0) {
    const why = source?.missing.find((missing) => missing.file === file)?.why;
    return <p class="none" id="no-source">Source text: {source ? why ?? "these lines are not in the file" : ASK}.</p>;
  }
  const share = (part: number, what: string) => (
    <td class="heat" data-what={what} data-samples={part} title={`${count(part)} samples ${what === "own" ? "in the line itself" : "in the line and what it calls"}`}
      style={{ background: `color-mix(in srgb, var(--heat) ${heat(part, samples)}%, transparent)` }}>{part > 0 ? percent(part, samples) : ""}</td>
  );
  return (
    <section>
      <h3>Source, with self and total by line{model.data.document.positions && lines.some((line) => line.marks.length > 0) ? " and by expression" : ""}</h3>
      {text.changed && <p class="changed">This file was changed after the recording began: lines may have moved.</p>}
      <table id="source"><thead><tr><th>Self</th><th>Total</th><th>Line</th><th /></tr></thead>
        {rows.map((run, place) => (
          <tbody key={place}>
            {run.map(([number, text, row]) => (
              <tr key={number} data-line={number} class={row ? "seen" : ""}>
                {share(row?.own ?? 0, "own")}{share(row?.total ?? 0, "total")}
                <td class="number">{number}</td>
                <td class="code">{pieces(text, row?.marks ?? []).map(({ text, mark }, index) => (mark
                  ? <mark key={index} data-own={mark.own} data-total={mark.total} title={`self ${count(mark.own)}, total ${count(mark.total)} samples`}
                    style={{ background: `color-mix(in srgb, var(--heat) ${heat(mark.total, samples)}%, transparent)` }}>{shown(text)}</mark>
                  : shown(text)))}</td>
              </tr>
            ))}
          </tbody>
        ))}
      </table>
    </section>
  );
}
