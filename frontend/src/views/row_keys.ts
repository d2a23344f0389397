/** Up and down walk from row to row of a table, from the button of one to that of the next. */

/** For the table's body: every row that can be opened or picked has a button in it. */
export function walkRows(event: KeyboardEvent): void {
  const down = event.key === "ArrowDown";
  if ((!down && event.key !== "ArrowUp") || event.altKey || event.ctrlKey || event.metaKey) return;
  let row = (event.target as Element).closest("tr");
  while (row) {
    row = (down ? row.nextElementSibling : row.previousElementSibling) as HTMLTableRowElement | null;
    const button = row?.querySelector<HTMLElement>("th button, th a");
    if (!button) continue;
    event.preventDefault();
    button.focus();
    return;
  }
}
