/** A table's rows by keyboard: one of them is a stop of the Tab key, up and down walk from it to the others. */
import { useEffect, useRef } from "preact/hooks";

/** For the table's body. What a row was opened to stays in reach of the Tab key. */
export function useRowKeys() {
  const body = useRef<HTMLTableSectionElement>(null);
  const stop = useRef<Element | null>(null);
  const leaveOneStop = (): void => {
    const rows = [...(body.current?.querySelectorAll("tr:not(.opened):has(a, button)") ?? [])];
    stop.current = rows.find((row) => row.contains(document.activeElement)) ?? rows.find((row) => row === stop.current) ?? rows[0] ?? null;
    for (const row of rows)
      for (const control of row.querySelectorAll<HTMLElement>("a, button")) control.tabIndex = row === stop.current ? 0 : -1;
  };
  useEffect(leaveOneStop);
  return { ref: body, onFocusIn: leaveOneStop, onKeyDown: walkRows };
}

function walkRows(event: KeyboardEvent): void {
  const down = event.key === "ArrowDown";
  if ((!down && event.key !== "ArrowUp") || event.altKey || event.ctrlKey || event.metaKey) return;
  let row = (event.target as Element).closest("tr");
  while (row) {
    row = (down ? row.nextElementSibling : row.previousElementSibling) as HTMLTableRowElement | null;
    const control = row?.querySelector<HTMLElement>("th :is(a, button)") ?? row?.querySelector<HTMLElement>("a, button");
    if (!control) continue;
    event.preventDefault();
    control.focus();
    return;
  }
}
