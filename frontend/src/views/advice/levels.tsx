import { exactBytes, unitFor, withUnit } from "../../state/bytes";

const MOST = 120;

/** What is alive where one step ends and the next begins: a bar each, from zero. */
export function Levels({ levels }: { levels: number[] }) {
  const every = Math.ceil(levels.length / MOST);
  const shown = levels.filter((_, i) => i % every === 0 || i === levels.length - 1);
  const [first, last] = [levels[0]!, levels[levels.length - 1]!];
  const unit = unitFor(...levels);
  const most = Math.max(1, ...shown);
  const words = `alive between steps: ${withUnit(first, unit)} at first, ${withUnit(last, unit)} at the end`;
  return (
    <figure class="levels" data-testid="levels">
      <div class="levels-bars" role="img" aria-label={words}>
        {shown.map((bytes, i) => (
          <span key={i} class="level" title={exactBytes(bytes)} style={{ height: `${Math.max(2, (100 * bytes) / most)}%` }} />
        ))}
      </div>
      <figcaption class="muted">{words}</figcaption>
    </figure>
  );
}
