// Source text with self and total heat by line, and by column where it is known: of a function, or of a file.

import { useEffect, useMemo, useRef } from "preact/hooks";
import { PYTHON } from "./data";
import { Bar, type Set, Share } from "./hot_spots";
import type { LineRow, Mark, Model, Row, Sums } from "./model";
import type { State } from "./place";
import { base, count, percent, shown } from "./words";

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
  const runs = inRuns(all.slice(Math.max(0, from), to).filter(([number]) => near(number)), rows);
  return runs.some((run) => run.some((line) => line[2])) ? runs : [];
}

/** Lines that follow each other. */
function inRuns(lines: [number, string][], rows: Map<number, LineRow>): Line[][] {
  const runs: Line[][] = [];
  for (const [number, text] of lines) {
    const run = runs[runs.length - 1];
    const line: Line = [number, text, rows.get(number)];
    if (run && run[run.length - 1]![0] + 1 === number) run.push(line);
    else runs.push([line]);
  }
  return runs;
}

type FileText = { file: number; changed: boolean; lines: [number, string][] };

/** The text of a file, by the index of its name. */
export function sourceOf(model: Model, file: number): FileText | undefined {
  return model.data.document.source?.files.find((found) => found.file === file);
}

const ASK = "Its text is not in this report: record with -o report.html --source, or tachyon-bpf export FILE.tach -o report.html --source on a machine that has the files";

/** Why the text of a file is not there. */
export function Missing({ model, file }: { model: Model; file: number }) {
  const { source } = model.data.document;
  const why = source?.missing.find((missing) => missing.file === file)?.why;
  return <p class="none" id="no-source">{source ? `No source text: ${why ?? "these lines are not in the file"}` : ASK}.</p>;
}

/** Lines of several functions that are one line of the file: a lambda, a generator's. */
function byLine(rows: LineRow[]): LineRow[] {
  const lines = new Map<number, LineRow>();
  for (const row of rows) {
    const known = lines.get(row.line);
    if (known) lines.set(row.line, { ...known, own: known.own + row.own, total: Math.max(known.total, row.total), marks: [...known.marks, ...row.marks] });
    else lines.set(row.line, row);
  }
  return [...lines.values()];
}

/** The source text of a function, or with `func` null of all that the report has of a file. */
export function Source({ model, file, func, lines, samples }: {
  model: Model; file: number; func: number | null; lines: LineRow[]; samples: number;
}) {
  const at = useRef<HTMLTableElement>(null);
  const text = sourceOf(model, file);
  const runs = useMemo(() => {
    if (!text) return [];
    if (func !== null) return ofFunction(text.lines, lines, model.name(func));
    return inRuns(text.lines, new Map(byLine(lines).map((line) => [line.line, line])));
  }, [text, lines, func]);
  // The hottest line is what somebody wants to see.
  useEffect(() => {
    const hottest = lines.reduce<LineRow | null>((hot, line) => (hot && hot.own >= line.own ? hot : line), null);
    const row = hottest && at.current?.querySelector(`[data-line="${hottest.line}"]`);
    const scrolled = at.current?.closest(".scrolled");
    if (!row || !scrolled) return;
    const from = row.getBoundingClientRect().top - scrolled.getBoundingClientRect().top;
    if (from < 0 || from > scrolled.clientHeight - 30) scrolled.scrollTop += from - scrolled.clientHeight / 3;
  }, [file, func]);
  if (!text || runs.length === 0) return <Missing model={model} file={file} />;
  const share = (part: number, what: string) => (
    <td class="heat" data-what={what} data-samples={part} title={`${count(part)} samples ${what === "own" ? "in the line itself" : "in the line and what it calls"}`}
      style={{ background: `color-mix(in srgb, var(--heat) ${heat(part, samples)}%, transparent)` }}>{part > 0 ? percent(part, samples) : ""}</td>
  );
  return (
    <>
      {text.changed && <p class="changed">This file was changed after the recording began: lines may have moved.</p>}
      <table class="source" id="source" ref={at}><thead><tr><th>Self</th><th>Total</th><th>Line</th><th /></tr></thead>
        {runs.map((run, place) => (
          <tbody key={place}>
            {run.map(([number, text, row]) => (
              <tr key={number} data-line={number} class={row ? "seen" : ""}>
                {share(row?.own ?? 0, "own")}{share(row?.total ?? 0, "total")}
                <td class="number">{number}</td>
                <td class="code">{pieces(text, row?.marks ?? []).map(({ text, mark }, index) => (mark
                  ? <mark key={index} data-own={mark.own} data-total={mark.total} title={`self ${percent(mark.own, samples)}, total ${percent(mark.total, samples)}`}
                    style={{ background: `color-mix(in srgb, var(--heat) ${heat(mark.total, samples)}%, transparent)` }}>{shown(text)}</mark>
                  : shown(text)))}</td>
              </tr>
            ))}
          </tbody>
        ))}
      </table>
    </>
  );
}

/** The files of the program, hottest first, and one of them. */
export function SourceView({ model, rows, sums, state, set }: { model: Model; rows: Row[]; sums: Sums; state: State; set: Set }) {
  const { functions } = model.data.document;
  const files = useMemo(() => {
    const own = new Map<number, number>();
    for (const row of rows) {
      if (model.kind(row.func) !== PYTHON || model.isTask(row.func)) continue;
      const file = functions.file[row.func]!;
      own.set(file, (own.get(file) ?? 0) + row.own);
    }
    return [...own].sort((a, b) => b[1] - a[1] || (model.text(a[0]) < model.text(b[0]) ? -1 : 1));
  }, [rows]);
  const ofSelected = state.selected !== null && model.kind(state.selected) === PYTHON ? functions.file[state.selected]! : null;
  const file = state.file ?? ofSelected ?? files[0]?.[0] ?? null;
  const lines = useMemo(() => (file === null ? [] : model.lines(sums, (func) => functions.file[func] === file)), [sums, file]);
  if (file === null) return <p class="empty">No Python code has samples here.</p>;
  return (
    <div class="source-view">
      <nav class="scrolled" aria-label="files">
        <table id="files"><tbody>
          {files.slice(0, 300).map(([other, own]) => (
            <tr key={other} class={other === file ? "selected" : ""} onClick={() => set({ file: other })}>
              <Share part={own} whole={sums.samples} what="own" />
              <td class="name" title={model.text(other)}><button class="link">{base(model.text(other))}</button>
                <span class="where">{directory(model.text(other))}</span>
                <Bar own={own} total={0} waiting={0} whole={sums.samples} /></td>
            </tr>
          ))}
        </tbody></table>
      </nav>
      <div class="scrolled">
        <h3 title={model.text(file)}>{model.text(file)}</h3>
        {sourceOf(model, file) ? <Source model={model} file={file} func={null} lines={lines} samples={sums.samples} /> : (
          <>
            <Missing model={model} file={file} />
            <HotLines model={model} lines={lines} sums={sums} set={set} />
          </>)}
      </div>
    </div>
  );
}

/** What stands before a file's name. */
function directory(path: string): string {
  return path.slice(0, Math.max(0, path.lastIndexOf("/")));
}

function HotLines({ model, lines, sums, set }: { model: Model; lines: LineRow[]; sums: Sums; set: Set }) {
  const most = lines.reduce((most, line) => Math.max(most, line.total), 0);
  return (
    <table id="hot-lines"><thead><tr><th>Self</th><th>Total</th><th>Line</th></tr></thead><tbody>
      {[...lines].sort((a, b) => b.own - a.own || b.total - a.total).slice(0, 200).map((line) => (
        <tr key={`${line.func} ${line.line}`} onClick={() => set({ selected: line.func })}>
          <Share part={line.own} whole={sums.samples} what="own" /><Share part={line.total} whole={sums.samples} what="total" />
          <td class="name"><button class="link">{line.line || "–"}</button> <span class="where">{model.name(line.func)}</span>
            <Bar own={line.own} total={line.total} waiting={0} whole={most} /></td>
        </tr>
      ))}
    </tbody></table>
  );
}
