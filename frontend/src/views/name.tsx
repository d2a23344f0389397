import { cellText, headAndTail, moduleLabel, shortened, titleText, visible } from "../state/names";

interface Props {
  text: string;
  /** Module keys get words for the root and for what no module owns. */
  module?: boolean;
  chip?: boolean;
  /** In the text's own font: for names that stand in a sentence of ours. */
  prose?: boolean;
  /** What the title shows instead of the name. */
  title?: string | undefined;
}

/** A name from outside: monospace, one line, cut in the middle where it does not fit, whole in the title. A chip may break. */
export function Name({ text, module = false, chip = false, prose = false, title }: Props) {
  const label = module ? moduleLabel(text) : text;
  if (chip)
    return (
      <span class="mono chip" title={titleText(title ?? label)}>
        {shortened(visible(label), 80)
          .split(/(?<=[._/])/)
          .flatMap((piece) => [piece, <wbr />])}
      </span>
    );
  return <CutName parts={headAndTail(cellText(label))} prose={prose} title={titleText(title ?? label)} />;
}

/** A name of two parts, of which the first gives way where both do not fit. */
export function CutName({ parts, prose, title }: { parts: [string, string]; prose?: boolean; title: string }) {
  const [head, tail] = parts;
  return (
    <span class={prose ? "name prose" : "name"} title={title} dir="ltr">
      <span class="head">{head}</span>
      {tail && (
        <span class="tail">
          <bdi dir="ltr">{tail}</bdi>
        </span>
      )}
    </span>
  );
}
