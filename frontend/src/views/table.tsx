import type { ComponentChildren } from "preact";
import type { Unit } from "../state/bytes";

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

/** Words, numbers, what the eye needs no head for, or a look of its own; nothing where it is false. */
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

interface BarProps {
  share: number;
  /** Of frames and lines, whose code they are. */
  kind?: string;
  background?: string;
}

/** A bar as long as a share of the row's width. */
export function ShareBar({ share, kind = "library", background }: BarProps) {
  return (
    <span class="share-bar" aria-hidden="true">
      {share > 0 && (
        <i class={background ? undefined : `flame-${kind}`} style={{ width: `${(100 * share).toFixed(2)}%`, background }} />
      )}
    </span>
  );
}

/** The head of a table with such bars: what a row is, its share, bytes, percent and allocations. */
export function ShareHead({ name, unit }: { name: string; unit: Unit }) {
  return (
    <Heads columns={[name, { unseen: "share" }, { number: unit.name }, { number: "%" }, { number: "allocations" }]} />
  );
}
