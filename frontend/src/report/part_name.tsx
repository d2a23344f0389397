import { categoryLabel } from "../state/categories";
import { cellText, titleText } from "../state/names";
import { CutName, Name } from "../views/name";

/** A key in words: categories and phases as the tab has them, of a stack its innermost frame, of a path its end. */
export function PartName({ by, name }: { by: string; name: string }) {
  if (by === "category" || by === "phase") return <>{categoryLabel(name)}</>;
  if (by === "line" || by === "stack") {
    const parts = fileAndLine(withoutFolders(cellText(name.split("\n", 1)[0]!)));
    return <CutName parts={parts} title={titleText(name)} />;
  }
  return <Name text={name} module={by === "module"} />;
}

/** `/long/way/to/train.py:7 (step)` -> `train.py:7 (step)`; `step /long/way/to/train.py:7` likewise. */
export function withoutFolders(text: string): string {
  return text.replace(/(^|\s)\S*[/\\]([^\s/\\]+:\d+)/, "$1$2");
}

/** Where a cell may cut: the file's name gives way, the line and what follows stay. */
export function fileAndLine(text: string): [string, string] {
  const at = text.search(/:\d+( \(|$)/);
  return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at)];
}
