import { navigate } from "../state/app";

interface Props {
  id: string;
  label: string;
  title: string;
  testid: string;
  /** The order now: a column's id, with a leading "-" once it was turned round. */
  now: string;
  /** The URL's key for it, which stays out where the order is the usual one. */
  by: "listed" | "ordered" | "ranked";
  usual: string;
  /** A column of words begins at A; one of numbers with the largest. */
  words?: boolean;
}

/** A column's head: a click sorts by it, a second one the other way round. */
export function SortedHead({ id, label, title, testid, now, by, usual, words = false }: Props) {
  const current = now.replace(/^-/, "") === id;
  const turned = now.startsWith("-");
  const upwards = turned !== words;
  const next = current && !turned ? `-${id}` : id;
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
        data-testid={testid}
        onClick={() => navigate({ [by]: next === usual ? undefined : next })}
      >
        {label}
        {current ? (upwards ? " ▴" : " ▾") : ""}
      </button>
    </th>
  );
}
