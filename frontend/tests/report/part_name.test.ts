import { expect, it } from "vitest";
import { fileAndLine, withoutFolders } from "../../src/report/part_name";

it.each([
  ["/long/way/to/train.py:7 (step)", "train.py:7 (step)"],
  ["step /long/way/to/train.py:7", "step train.py:7"],
  ["C:\\home\\me\\train.py:7 (step)", "train.py:7 (step)"],
  ["train.py:7 (step)", "train.py:7 (step)"],
  ["??:0 (at::native::mm(int, char))", "??:0 (at::native::mm(int, char))"],
  ["(no stack)", "(no stack)"],
])("%s loses its folders", (text, short) => expect(withoutFolders(text)).toBe(short));

it.each([
  ["train.py:7 (step)", ["train.py", ":7 (step)"]],
  ["step train.py:7", ["step train.py", ":7"]],
  ["(no stack)", ["(no stack)", ""]],
])("%s is cut before its line", (text, parts) => expect(fileAndLine(text)).toEqual(parts));
