/** To the clipboard through its own way, else (a page over plain http has none) through a selection. */
export async function copyText(text: string): Promise<void> {
  if (navigator.clipboard) {
    try {
      return await navigator.clipboard.writeText(text);
    } catch {
      // refused inside a frame: the old way may be allowed
    }
  }
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  const before = document.activeElement as HTMLElement | null;
  (before?.parentElement ?? document.body).append(area); // a panel that the focus leaves would close
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  if (!done) throw new Error("refused");
}
