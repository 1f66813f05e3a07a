// A pen that draws into an SVG instead of a canvas. It has the part of a canvas context that the pictures
// use.

const escapedXml = (text) => String(text).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "").replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const rounded = (number) => String(Math.round(number * 100) / 100);

class SvgPen {
  constructor() {
    this.parts = [];
    this.path = [];
    this.dash = [];
    this.stack = [];
    Object.assign(this, { fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, globalAlpha: 1, textAlign: "left", textBaseline: "alphabetic", font: "12px system-ui, sans-serif", isLacking: false });
  }

  /// Returns a colour. Patterns and gradients of a canvas have no text.
  paint(style) {
    if (typeof style !== "string") { this.isLacking = true; return "#888"; }
    return escapedXml(style);
  }

  add(tag, attributes, text) {
    const alpha = this.globalAlpha < 1 ? ` opacity="${rounded(this.globalAlpha)}"` : "";
    this.parts.push(`<${tag} ${attributes}${alpha}${text === undefined ? "/>" : `>${escapedXml(text)}</${tag}>`}`);
  }

  lines() {
    const dash = this.dash.length ? ` stroke-dasharray="${this.dash.map(rounded).join(" ")}"` : "";
    return `fill="none" stroke="${this.paint(this.strokeStyle)}" stroke-width="${rounded(this.lineWidth)}"${dash}`;
  }

  box(x, y, w, h) { return `x="${rounded(Math.min(x, x + w))}" y="${rounded(Math.min(y, y + h))}" width="${rounded(Math.abs(w))}" height="${rounded(Math.abs(h))}"`; }

  fillRect(x, y, w, h) { this.add("rect", `${this.box(x, y, w, h)} fill="${this.paint(this.fillStyle)}"`); }

  strokeRect(x, y, w, h) { this.add("rect", `${this.box(x, y, w, h)} ${this.lines()}`); }

  beginPath() { this.path = []; }

  moveTo(x, y) { this.path.push(`M${rounded(x)} ${rounded(y)}`); }

  lineTo(x, y) { this.path.push(`${this.path.length ? "L" : "M"}${rounded(x)} ${rounded(y)}`); }

  closePath() { this.path.push("Z"); }

  rect(x, y, w, h) { this.path.push(`M${rounded(x)} ${rounded(y)}h${rounded(w)}v${rounded(h)}h${rounded(-w)}Z`); }

  /// Draws whole circles only, which is what the pictures use.
  arc(x, y, r) { this.path.push(`M${rounded(x - r)} ${rounded(y)}a${rounded(r)} ${rounded(r)} 0 1 0 ${rounded(2 * r)} 0a${rounded(r)} ${rounded(r)} 0 1 0 ${rounded(-2 * r)} 0Z`); }

  fill(path) {
    if (path) this.isLacking = true;
    this.add("path", `d="${this.path.join("")}" fill="${this.paint(this.fillStyle)}"`);
  }

  stroke(path) {
    if (path) this.isLacking = true;
    this.add("path", `d="${this.path.join("")}" ${this.lines()}`);
  }

  fillText(text, x, y) {
    const anchor = { right: "end", end: "end", center: "middle" }[this.textAlign] || "start";
    const size = /(\d+(?:\.\d+)?)px/.exec(this.font)?.[1] || "12";
    const weight = /^(bold|[6-9]00)\b/.test(this.font) ? ' font-weight="bold"' : "";
    this.add("text", `x="${rounded(x)}" y="${rounded(y)}" font-size="${size}"${weight} text-anchor="${anchor}" fill="${this.paint(this.fillStyle)}"`, text);
  }

  measureText(text) { return { width: text.length * 6.5 }; }

  setLineDash(dash) { this.dash = [...dash]; }

  save() { this.stack.push([this.fillStyle, this.strokeStyle, this.lineWidth, this.globalAlpha, this.textAlign, this.font, this.dash]); }

  restore() { [this.fillStyle, this.strokeStyle, this.lineWidth, this.globalAlpha, this.textAlign, this.font, this.dash] = this.stack.pop() || [this.fillStyle, this.strokeStyle, this.lineWidth, this.globalAlpha, this.textAlign, this.font, this.dash]; }

  /// Draws what `act` draws, moved.
  moved(x, y, act) {
    this.parts.push(`<g transform="translate(${rounded(x)} ${rounded(y)})">`);
    act();
    this.parts.push("</g>");
  }
}

/// Returns a pen for an SVG. Calls that it does not have are ignored and noted in `isLacking`.
function svgPen() {
  return new Proxy(new SvgPen(), { get(pen, name) {
    if (name in pen) return typeof pen[name] === "function" ? pen[name].bind(pen) : pen[name];
    return () => { pen.isLacking = true; };
  } });
}

/// The name space of SVG. In two parts, so that the page contains no address.
const SVG_SPACE = "http:" + "//www.w3.org/2000/svg";

/// Returns the text of an SVG file.
function svgText(pen, width, height) {
  return `<svg xmlns="${SVG_SPACE}" width="${rounded(width)}" height="${rounded(height)}" viewBox="0 0 ${rounded(width)} ${rounded(height)}" font-family="system-ui, sans-serif">${pen.parts.join("")}</svg>\n`;
}
