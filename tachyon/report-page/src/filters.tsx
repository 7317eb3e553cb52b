// Choices that all views follow: whose samples, and of what code.

import { useMemo } from "preact/hooks";
import type { Set } from "./hot_spots";
import type { Model } from "./model";
import type { State } from "./place";

/** Most choices of a list. */
const MOST = 2000;

interface Choice { value: number; text: string }

function Select({ id, all, choices, value, choose }: {
  id: string; all: string; choices: Choice[]; value: number | null; choose(value: number | null): void;
}) {
  return (
    <select id={id} aria-label={id} class={value === null ? "" : "active"} value={value ?? ""}
      onChange={(event) => choose(event.currentTarget.value === "" ? null : Number(event.currentTarget.value))}>
      <option value="">{all}</option>
      {choices.slice(0, MOST).map(({ value, text }) => <option key={value} value={value}>{text}</option>)}
    </select>
  );
}

export function Filters({ model, state, set, threadsToo }: { model: Model; state: State; set: Set; threadsToo: boolean }) {
  const { processes, threads } = model.data.document;
  const modules = useMemo(() => {
    const sums = new Map<number, number>();
    for (const row of model.allRows)
      if (!model.isMark(row.func) && !model.isTask(row.func)) sums.set(model.module(row.func), (sums.get(model.module(row.func)) ?? 0) + row.own);
    return [...sums].sort((a, b) => b[1] - a[1]).map(([value]) => ({ value, text: model.text(value) }));
  }, [model]);
  const tasks = useMemo(() => model.tasks.map((value) => ({ value, text: model.task(value) })), [model]);
  const shown = threads.map((thread, value) => ({ value, text: thread.name, process: thread.process }))
    .filter((thread) => state.process === null || thread.process === state.process);
  return (
    <>
      {threadsToo && processes.length > 1 && <Select id="process" all={`all ${processes.length} processes`} value={state.process}
        choices={processes.map(({ name }, value) => ({ value, text: name }))} choose={(process) => set({ process, thread: null })} />}
      {threadsToo && threads.length > 1 && <Select id="thread" all={`all ${shown.length} threads`} value={state.thread} choices={shown}
        choose={(thread) => set({ thread })} />}
      {tasks.length > 0 && <Select id="task" all={tasks.length > 1 ? `all ${tasks.length} tasks` : "any task"} value={state.task} choices={tasks}
        choose={(task) => set({ task, zoom: [] })} />}
      <Select id="module" all="all modules" value={state.module} choices={modules} choose={(module) => set({ module, zoom: [] })} />
    </>
  );
}
