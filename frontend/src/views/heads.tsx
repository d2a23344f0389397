import type { ComponentChildren } from "preact";

/** The head of a column of numbers that is not sorted by. */
export function NumberHead({ title, children }: { title?: string; children: ComponentChildren }) {
  return (
    <th scope="col" class="number" title={title}>
      {children}
    </th>
  );
}

/** The head of a column that needs none for the eye. */
export function UnseenHead({ wide = false, children }: { wide?: boolean; children: ComponentChildren }) {
  return (
    <th scope="col" class={wide ? "wide" : undefined}>
      <span class="unseen">{children}</span>
    </th>
  );
}

/** Words, and columns of numbers, that the eye needs no head for, or with a look of their own. */
type Column = string | false | { number: string } | { unseen: string; wide?: boolean } | { text: string; look: string; title?: string };

/** The head of a table that is not sorted by anything. */
export function Heads({ columns }: { columns: readonly Column[] }) {
  return (
    <thead>
      <tr>{columns.map((column, i) => column !== false && <Head key={i} column={column} />)}</tr>
    </thead>
  );
}

function Head({ column }: { column: Exclude<Column, false> }) {
  if (typeof column === "string") return <th scope="col">{column}</th>;
  if ("number" in column) return <NumberHead>{column.number}</NumberHead>;
  if ("unseen" in column) return <UnseenHead wide={column.wide ?? false}>{column.unseen}</UnseenHead>;
  return (
    <th scope="col" class={column.look} title={column.title}>
      {column.text}
    </th>
  );
}
