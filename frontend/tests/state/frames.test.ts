import { describe, expect, it } from "vitest";
import { frameName, frameWhere, lineParts, nativeName, searchFor, toldApart } from "../../src/state/frames";

const frame = { text: "", function: "f", file: "/a/b.py", line: 3, kind: "user", fx: "" } as const;

describe("frames", () => {
  it("show what ran and where, without folders", () => {
    expect([frameName(frame), frameWhere(frame)]).toEqual(["f", "b.py:3"]);
    expect(frameWhere({ ...frame, file: "C:\\x\\y.py" })).toBe("y.py:3");
    expect(frameWhere({ ...frame, file: "??" })).toBe("");
  });
  it("of C++ lose their arguments", () => {
    expect(nativeName("at::(anonymous namespace)::add(at::Tensor const&)")).toBe("at::add");
    expect(nativeName("(odd)")).toBe("(odd)");
  });
  it("bear any name", () => {
    expect(frameName({ ...frame, function: "\u202ef\n" })).toBe("\ufffdf⏎");
    expect(frameName({ ...frame, function: "x".repeat(10_000) }).length).toBe(160);
  });
});

describe("source lines", () => {
  it("are told apart by file, line and function", () =>
    expect(lineParts("/a/b (x86)/model.py:20 (forward)")).toEqual({
      place: "model.py:20",
      name: "forward",
      folder: "/a/b (x86)/",
    }));
  it("of a very long file name keep both its ends, so that the function has room, too", () => {
    const { place, name } = lineParts(`/a/${"x".repeat(200)}.py:1234 (forward)`);
    expect([place.length, place.slice(-8), name]).toEqual([48, ".py:1234", "forward"]);
  });
  it("of Python code whose line is not known are file and function", () => {
    expect(lineParts("/a/b (x86)/train.py (<module>)")).toEqual({ place: "train.py", name: "<module>", folder: "/a/b (x86)/" });
    expect(searchFor("/a/b (x86)/train.py (<module>)")).toBe("train.py");
    expect(frameWhere({ ...frame, line: 0 })).toBe("b.py");
  });
  it("of C++ are the function", () =>
    expect(lineParts("Register.cpp:0 (at::add(Tensor))")).toEqual({ place: "at::add", name: "", folder: "" }));
  it("that are none stay as they are", () => expect(lineParts("(no stack)").place).toBe("(no stack)"));
});

describe("stacks that go by the same line", () => {
  const of = (...frames: string[]): { key: string; label: string } => ({ key: frames.join("\n"), label: "/a/train.py:3 (main)" });
  const [linear, gelu, plain] = [
    of("<built-in function linear>", "forward torch/nn/linear.py:130", "main /a/train.py:3"),
    of("at::gelu(at::Tensor const&) ??:0", "forward torch/nn/act.py:8", "main /a/train.py:3"),
    of("main /a/train.py:3"),
  ] as const;

  it("are told apart by what ran innermost in each alone", () => {
    expect([...toldApart([linear, gelu]).values()]).toEqual(["linear", "at::gelu"]);
    const inner = [of("empty c.py:1", "relu f.py:2", "main"), of("empty c.py:1", "silu f.py:3", "main")];
    expect([...toldApart(inner).values()]).toEqual(["relu", "silu"]);
  });
  it("bear one that has nothing of its own", () =>
    expect([...toldApart([linear, plain]).values()]).toEqual(["linear", ""]));
  it("need no more where each has a line of its own", () =>
    expect(toldApart([linear, { key: "(no stack)", label: "(no stack)" }]).size).toBe(0));
});
