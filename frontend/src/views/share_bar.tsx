import type { Unit } from "../state/bytes";
import { Heads } from "./heads";

interface Props {
  share: number;
  /** Of frames and lines, whose code they are. */
  kind?: string;
  background?: string;
}

/** A bar as long as a share of the row's width. */
export function ShareBar({ share, kind = "library", background }: Props) {
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
