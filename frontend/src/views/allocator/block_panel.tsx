import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import { type BlockAnswer, FREE, type SegmentsAnswer } from "../../api/types";
import { exactBytes } from "../../state/bytes";
import { moduleLabel, titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { asPartOfPeak } from "../../state/app";
import type { Pick } from "../../state/selection";
import { duration, exactTime } from "../../state/time";
import { Category } from "../category";
import { Name } from "../name";
import { FrameList } from "../stacks/frame_list";
import { SAME_WINDOW, type ShownMoment } from "./moment";
import type { Place } from "./tape_view";
import { Fact } from "../fact";

interface Props {
  pick: Pick;
  moment: ShownMoment;
  answer: SegmentsAnswer | undefined;
  hovered: Place | null;
  selected: number | null;
  origin: number;
}

/** What is pointed at, else what was kept. */
export function BlockPanel({ pick, moment, answer, hovered, selected, origin }: Props) {
  const piece = hovered && answer && hovered.piece < answer.pieces.bytes.length ? hovered.piece : -1;
  const row = piece >= 0 ? answer!.pieces.row[piece]! : (selected ?? -1);
  const path = row >= 0 && moment.query ? address("allocator_block", { ...pick, ...moment.query, row }) : null;
  const block = useRemote<BlockAnswer>(path, piece >= 0 ? 60 : 0, SAME_WINDOW);
  if (piece >= 0 && row < 0) return <Stretch answer={answer!} piece={piece} />;
  if (row < 0)
    return (
      <aside class="side block-panel" data-testid="block-panel" data-kind="none">
        <p class="muted">
          Point at a block to see its size, its address, its lifetime and the code that allocated it.
        </p>
      </aside>
    );
  if (block.failure)
    return (
      <aside class="side block-panel" data-testid="block-panel" data-kind="none">
        <p class="muted">
          {block.status === 400
            ? "The block in this page's address is not in this window."
            : titleText(block.failure.what)}
        </p>
      </aside>
    );
  if (!block.data) return <aside class="side block-panel" data-testid="block-panel" aria-busy="true" />;
  return <Details block={block.data} moment={moment} origin={origin} stale={block.stale} />;
}

/** A free stretch, or several stretches too narrow to tell apart. */
function Stretch({ answer, piece }: { answer: SegmentsAnswer; piece: number }) {
  const { pieces, segments } = answer;
  const segment = pieces.segment[piece]!;
  const count = pieces.count[piece]!;
  const bytes = pieces.bytes[piece]!;
  const free = pieces.state[piece] === FREE && count === 1;
  return (
    <aside class="side block-panel" data-testid="block-panel" data-kind={free ? "free" : "many"}>
      <h2>{free ? "Free" : `${grouped(count)} blocks and gaps`}</h2>
      <div class="big amount" title={exactBytes(bytes)}>
        {asPartOfPeak(bytes)}
      </div>
      <dl class="facts">
        <Fact of="at" class="mono">{plus(segments.address[segment]!, pieces.offset[piece]!)}</Fact>
        <Fact of="segment">
          <span class="mono">{segments.address[segment]}</span>, {asPartOfPeak(segments.bytes[segment]!)}
          {segments.expandable[segment] ? ", expandable" : ""}
        </Fact>
        <Fact of="free in it" title={exactBytes(segments.free[segment]!)}>{asPartOfPeak(segments.free[segment]!)}</Fact>
      </dl>
      {!free && <p class="muted">They are narrower than a pixel: make the tape larger to see each.</p>}
    </aside>
  );
}

/** Addresses have more bits than a number of JavaScript. */
function plus(start: string, offset: number): string {
  return `0x${(BigInt(start) + BigInt(offset)).toString(16)}`;
}

interface DetailsProps {
  block: BlockAnswer;
  moment: ShownMoment;
  origin: number;
  stale: boolean;
}

function Details({ block, moment, origin, stale }: DetailsProps) {
  const owner = block.name ?? (block.module === null ? null : moduleLabel(block.module));
  return (
    <aside
      class={stale ? "side block-panel stale" : "side block-panel"}
      data-testid="block-panel"
      data-kind="block"
      data-exact={stale ? "false" : "true"}
      data-address={block.address}
    >
      <h2>
        <Category of={block.category} />
        {block.state !== "allocated" && (
          <span class="pill">{block.state === "gone" ? "not alive now" : "pending"}</span>
        )}
      </h2>
      <div class="big amount" title={exactBytes(block.bytes)} data-testid="block-bytes">
        {asPartOfPeak(block.bytes)} <span class="approx">requested</span>
      </div>
      {owner !== null && (
        <p class="where">
          <Name text={owner} />
        </p>
      )}
      <p class="where" data-testid="block-why">
        {titleText(block.why)}
      </p>
      <dl class="facts">
        {block.tensor !== null && (
          <Fact of="tensor" class="mono">{titleText(block.tensor)}</Fact>
        )}
        {block.rounded_bytes !== null && (
          <Fact of="takes" title={exactBytes(block.rounded_bytes)} data-testid="block-rounded">
            {exactBytes(block.rounded_bytes)}
            {block.by_rule ? " by the rounding rule" : ""}
          </Fact>
        )}
        <Fact of="address" class="mono">{block.address}</Fact>
        {block.segment && (
          <Fact of="segment">
            <span class="mono">{block.segment.address}</span> + {grouped(block.segment.offset)}, of{" "}
            {asPartOfPeak(block.segment.bytes)}
          </Fact>
        )}
        <Fact of="alive since">
          <When
            event={block.born_event}
            time={block.born_ns}
            none="before the window"
            moment={moment}
            origin={origin}
          />
        </Fact>
        {block.pending_event !== null && (
          <Fact of="free requested">
            <When event={block.pending_event} time={block.pending_ns} none="" moment={moment} origin={origin} />
          </Fact>
        )}
        <Fact of="until">
          <When
            event={block.freed_event}
            time={block.freed_ns}
            none="the window's end"
            moment={moment}
            origin={origin}
          />
        </Fact>
        <Fact of="pool">
          {titleText(block.pool)}, {titleText(block.stream)}
        </Fact>
        {block.context !== null && (
          <Fact of="compiled graph" class="breaking">{titleText(block.context)}</Fact>
        )}
      </dl>
      <FrameList title="Call stack" frames={block.stack} />
    </aside>
  );
}

interface WhenProps {
  event: number | null;
  time: number | null;
  none: string;
  moment: ShownMoment;
  origin: number;
}

/** A moment of the block's life; a click shows it. */
function When({ event, time, none, moment, origin }: WhenProps) {
  if (event === null || time === null) return <span class="muted">{none}</span>;
  return (
    <button type="button" class="quiet" title={exactTime(time - origin)} onClick={() => moment.show(event, time)}>
      {duration(time - origin)}, event {grouped(event)}
    </button>
  );
}
