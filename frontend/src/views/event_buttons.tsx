import type { ComponentChildren } from "preact";

interface Props {
  /** Whether there is an event before, and one after. */
  before: boolean;
  after: boolean;
  onStep: (by: 1 | -1) => void;
  /** Absent where the peak is shown, or not known. */
  onPeak?: (() => void) | false | undefined;
  children?: ComponentChildren;
}

/** From event to event, and back to the peak. */
export function EventButtons({ before, after, onStep, onPeak, children }: Props) {
  return (
    <div class="buttons">
      <button type="button" class="small" data-testid="event-previous" disabled={!before} onClick={() => onStep(-1)}>
        ← event
      </button>
      <button type="button" class="small" data-testid="event-next" disabled={!after} onClick={() => onStep(1)}>
        event →
      </button>
      {onPeak && (
        <button type="button" class="small" data-testid="to-peak" onClick={onPeak}>
          to the peak
        </button>
      )}
      {children}
    </div>
  );
}
