import { cellText, titleText } from "../state/names";

/** What lies in an allocation, `float32 [8, 2048]`, in small letters; nothing where that is not known. */
export function Tensor({ text }: { text: string | null }) {
  if (text === null) return null;
  return (
    <span class="approx mono" title={titleText(text)}>
      {" "}
      {cellText(text)}
    </span>
  );
}
