interface Props<T extends string> {
  label: string;
  options: readonly (readonly [T, string])[];
  value: T;
  onPick: (value: T) => void;
  testid?: string;
}

/** A choice of a few, as buttons in one frame. */
export function Segmented<T extends string>({ label, options, value, onPick, testid }: Props<T>) {
  return (
    <div class="segmented" role="group" aria-label={label} data-testid={testid}>
      {options.map(([option, text]) => (
        <button
          key={option}
          type="button"
          aria-pressed={option === value}
          data-testid={testid && `${testid}-${option}`}
          onClick={() => onPick(option)}
        >
          {text}
        </button>
      ))}
    </div>
  );
}

export function Toggle({
  text,
  on,
  onFlip,
  testid,
}: {
  text: string;
  on: boolean;
  onFlip: () => void;
  testid?: string;
}) {
  return (
    <button type="button" class="toggle" aria-pressed={on} data-testid={testid} onClick={onFlip}>
      <span class="tick" aria-hidden="true">
        ✓
      </span>
      {text}
    </button>
  );
}
