import type { ReserveCurve } from "../../api/allocator";

/** What the chart's colours and lines mean. */
export function Key({ curve }: { curve: ReserveCurve | undefined }) {
  const pending = curve?.pending.some((bytes) => bytes > 0);
  return (
    <span class="keys" aria-hidden="true">
      <span class="key">
        <span class="swatch level-allocated" />
        allocated
      </span>
      {pending && (
        <span class="key">
          <span class="swatch level-pending" />
          pending
        </span>
      )}
      {curve?.reserved && (
        <>
          <span class="key">
            <span class="line dashes" />
            reserved
          </span>
          <span class="key" title="(reserved − allocated) / reserved">
            <span class="swatch level-unused" />
            unused, below as a share
          </span>
        </>
      )}
      {curve !== undefined && curve.split.length > 0 && (
        <span class="key" title="1 − largest free block / all free memory">
          <span class="dots" />
          free, but in pieces
        </span>
      )}
    </span>
  );
}
