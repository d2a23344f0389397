import type { ReserveCurve } from "../../api/types";
import { KeyEntry } from "../key_entry";

/** What the chart's colors and lines mean. */
export function Key({ curve }: { curve: ReserveCurve | undefined }) {
  const pending = curve?.pending.some((bytes) => bytes > 0);
  return (
    <span class="keys" aria-hidden="true">
      <KeyEntry look="swatch level-allocated">allocated</KeyEntry>
      {pending && (
        <KeyEntry look="swatch level-pending">pending</KeyEntry>
      )}
      {curve?.reserved && (
        <>
          <KeyEntry look="line dashes">reserved</KeyEntry>
          <KeyEntry look="swatch level-unused" title="(reserved − allocated) / reserved">
            unused, below as a share
          </KeyEntry>
        </>
      )}
      {curve !== undefined && curve.split.length > 0 && (
        <KeyEntry look="dots" title="1 − largest free block / all free memory">
          free, but in pieces
        </KeyEntry>
      )}
    </span>
  );
}
