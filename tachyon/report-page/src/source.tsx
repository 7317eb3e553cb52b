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

const ASK = "not in this file: record with -o report.html --source, or tachyon-bpf export FILE.tach -o report.html --source on a machine that has the files";

export function Source({ model, func, lines, samples }: { model: Model; func: number; lines: LineRow[]; samples: number }) {
  const { source, functions } = model.data.document;
  const file = functions.file[func]!;
  const text = useMemo(() => source?.files.find((found) => found.file === file), [source, file]);
  // The lines around those that were seen; another function of the file may lie beyond a gap.
  const rows = useMemo(() => {
    if (!text) return [];
    const seen = new Map(lines.map((line) => [line.line, line]));
    const runs: [number, string][][] = [];
    for (const line of text.lines) {
      const run = runs[runs.length - 1];
      if (run && run[run.length - 1]![0] + 1 === line[0]) run.push(line);
      else runs.push([line]);
    }
    return runs.filter((run) => run.some(([number]) => seen.has(number)))
      .map((run) => run.map(([number, text]) => ({ number, text, row: seen.get(number) })));
  }, [text, lines]);
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
            {run.map(({ number, text, row }) => (
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
