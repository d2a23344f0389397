/** Frames and source lines as people read them. Their texts come from files: hostile until made visible. */
import type { Frame } from "../api/types";
import { cellText, shortened, visible } from "./names";

/** Of a file, with its line: else its name would leave the function none of the row. */
const LONGEST_PLACE = 48;

/** What ran, short enough for a bar: C++ without its arguments. */
export function frameName(frame: Frame): string {
  const name = frame.function || frame.text || "?";
  return cellText(frame.kind === "native" ? nativeName(name) : name);
}

/** `at::(anonymous namespace)::add(Tensor const&)` as `at::add`. */
export function nativeName(name: string): string {
  const plain = name.replaceAll("(anonymous namespace)::", "");
  const cut = plain.indexOf("(");
  return cut > 0 ? plain.slice(0, cut) : plain;
}

/** Where: the file's last part and the line; nothing for C++, whose files nobody knows. */
export function frameWhere(frame: Frame): string {
  return cellText(lastPart(framePath(frame)));
}

export function frameFolder(frame: Frame): string {
  const path = framePath(frame);
  return path.slice(0, path.length - lastPart(path).length);
}

/** Folder, file and line. Code outside functions has line 0: which of its lines ran is not known. */
export function framePath({ file, line }: Frame): string {
  return file === "??" ? "" : line === 0 ? file : `${file}:${line}`;
}

const LINE = /^(.*?)(:-?\d+|(?<=\.pyx?|>)) \((.*)\)$/s;

export function lastPart(path: string): string {
  return path.slice(Math.max(path.lastIndexOf("/"), path.lastIndexOf("\\")) + 1);
}

/** `/a/b/model.py:20 (forward)` as what tells it apart: `model.py:20`, `forward`, and `/a/b/`. Python code has no number
 * where its line is not known. */
export function lineParts(line: string): { place: string; name: string; folder: string } {
  const found = LINE.exec(line);
  if (!found) return { place: visible(line), name: "", folder: "" };
  const [, path, number = "", name] = found as unknown as [string, string, string | undefined, string];
  const file = lastPart(path);
  if (number === ":0" || path === "??" || path === "") return { place: visible(nativeName(name)), name: "", folder: "" };
  return {
    place: shortened(visible(file + number), LONGEST_PLACE),
    name: visible(name),
    folder: visible(path.slice(0, path.length - file.length)),
  };
}

/** `/a/model.py:20 (forward)` is found by `model.py:20`, in frames and in lines. */
export function searchFor(line: string): string {
  const [, path = line, number = ""] = LINE.exec(line) ?? [];
  return lastPart(path + number).slice(0, 400);
}

/** Of stacks that go by the same line, by key: what ran in the innermost frame that not all of them have. */
export function toldApart(parts: readonly { key: string; label?: string }[]): Map<string, string> {
  const alike = new Map<string, string[]>();
  for (const { key, label = key } of parts) {
    const group = alike.get(label);
    if (group) group.push(key);
    else alike.set(label, [key]);
  }
  const own = new Map<string, string>();
  for (const keys of [...alike.values()].filter((group) => group.length > 1)) {
    const stacks = keys.map((key) => key.split("\n"));
    const shared = stacks.map((frames) => new Set(frames)).reduce((a, b) => new Set([...a].filter((frame) => b.has(frame))));
    stacks.forEach((frames, i) => own.set(keys[i]!, ranIn(frames.find((frame) => !shared.has(frame)) ?? "")));
  }
  return own;
}

/** `linear` of `<built-in function linear>`, `backward` of `backward torch/_tensor.py:566`. */
function ranIn(frame: string): string {
  const built = /^<built-in (?:function|method) ([^ >]+)/.exec(frame);
  return visible(built ? built[1]! : nativeName(frame.replace(/ [^ ]*:\d+$/, "")));
}
