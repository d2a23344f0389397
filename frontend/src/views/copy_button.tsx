import { useState } from "preact/hooks";
import { copyText } from "../host/clipboard";

interface Props {
  label: string;
  text: () => string;
  testid: string;
  title?: string | undefined;
  look?: string;
}

/** Copies a text. Where the browser keeps the clipboard shut, it says so. */
export function CopyButton({ label, text, testid, title, look = "quiet" }: Props) {
  const [shown, show] = useState(label);
  const copy = (): void => {
    copyText(text()).then(
      () => show("copied"),
      () => show("the browser does not allow it"),
    );
    setTimeout(() => show(label), 2500);
  };
  return (
    <button type="button" class={look} data-testid={testid} title={title} onClick={copy}>
      {shown}
    </button>
  );
}
