import { describe, expect, it } from "vitest";
import { frameName, frameWhere, lineParts, nativeName } from "../../src/state/frames";

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
  it("of C++ are the function", () =>
    expect(lineParts("Register.cpp:0 (at::add(Tensor))")).toEqual({ place: "at::add", name: "", folder: "" }));
  it("that are none stay as they are", () => expect(lineParts("(no stack)").place).toBe("(no stack)"));
});
