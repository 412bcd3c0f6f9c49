/** What the views ask of the document. */

/**
 * The element with an id.
 * @template {HTMLElement} T
 * @param {string} id
 * @returns {T}
 */
export function byId(id) {
  return /** @type {T} */ (document.getElementById(id));
}

/**
 * Text for a screen reader.
 * @param {string} text
 */
export function speak(text) {
  byId("spoken").textContent = text;
}

/**
 * Text into the clipboard; where the browser does not allow that, by way of a selection.
 * @param {string} text @param {string} message shown afterwards
 */
export async function copyText(text, message) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.setAttribute("aria-label", "Text to copy");
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  byId("copied").textContent = message;
}
