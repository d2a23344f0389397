import { navigate, route } from "../state/app";
import { readOrder } from "../state/route";

export interface Sorting {
  /** The URL's key for the order, which stays out where the order is the usual one. */
  by: "listed" | "ordered" | "ranked";
  orders: readonly string[];
  usual: string;
  /** What the heads' test ids begin with. */
  testid: string;
}

interface Props {
  sorting: Sorting;
  id: string;
  label: string;
  title: string;
  /** A column of words begins at A; one of numbers with the largest. */
  words?: boolean;
}

/** A column's head: a click sorts by it, a second one the other way round. */
export function SortedHead({ sorting: { by, orders, usual, testid }, id, label, title, words = false }: Props) {
  const now = readOrder(route.value[by], orders, usual);
  const current = now.by === id;
  const upwards = now.turned !== words;
  const next = current && !now.turned ? `-${id}` : id;
  return (
    <th
      scope="col"
      class={words ? undefined : "number"}
      aria-sort={current ? (upwards ? "ascending" : "descending") : undefined}
    >
      <button
        type="button"
        class="sorts"
        title={title}
        data-testid={`${testid}-${id}`}
        onClick={() => navigate({ [by]: next === usual ? undefined : next })}
      >
        {label}
        {current ? (upwards ? " ▴" : " ▾") : ""}
      </button>
    </th>
  );
}
