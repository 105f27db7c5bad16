"use strict";
(() => {
  const root = document.documentElement;

  // Theme: the system's choice until the reader makes one. Storage may be refused for local files.
  const systemDark = window.matchMedia("(prefers-color-scheme: dark)");
  const themeButton = document.getElementById("theme");
  const stored = () => { try { return localStorage.getItem("ergoflow-theme"); } catch { return null; } };
  const store = (value) => { try { localStorage.setItem("ergoflow-theme", value); } catch { /* not kept */ } };
  const isDark = () => (root.dataset.theme || (systemDark.matches ? "dark" : "light")) === "dark";
  const showTheme = () => { themeButton.textContent = isDark() ? "Light" : "Dark"; };
  if (stored() === "dark" || stored() === "light") root.dataset.theme = stored();
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    store(root.dataset.theme);
    showTheme();
  });
  systemDark.addEventListener("change", showTheme);
  showTheme();

  // Tables: sort by the visible variant of a column; what was not measured stays last either way.
  const sortKey = (row, index) => {
    const cell = row.cells[index];
    if (index === 0) return cell.textContent.trim();
    const shown = cell.querySelector(".cell:not([hidden])");
    return shown && shown.dataset.value !== undefined ? Number(shown.dataset.value) : null;
  };
  const sortTable = (table, index, direction) => {
    const sign = direction === "ascending" ? 1 : -1;
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [sortKey(row, index), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      if (typeof a === "string") return sign * a.localeCompare(b, "en", { numeric: true });
      return a === b ? 0 : sign * (a < b ? -1 : 1);
    });
    for (const [, row] of rows) body.append(row);
    [...table.tHead.rows[0].cells].forEach((head, i) => head.setAttribute("aria-sort", i === index ? direction : "none"));
  };
  for (const table of document.querySelectorAll("table.scores")) {
    [...table.tHead.rows[0].cells].forEach((head, index) => {
      const button = head.querySelector(".sort");
      button.addEventListener("click", () => {
        const first = button.dataset.first;
        const other = first === "ascending" ? "descending" : "ascending";
        sortTable(table, index, head.getAttribute("aria-sort") === first ? other : first);
      });
      const menu = head.querySelector(".variant");
      if (menu) menu.addEventListener("change", () => {
        for (const row of table.tBodies[0].rows)
          for (const cell of row.cells[index].querySelectorAll(".cell")) cell.hidden = cell.dataset.metric !== menu.value;
        const direction = head.getAttribute("aria-sort");
        if (direction !== "none") sortTable(table, index, direction);
      });
    });
  }

  // A link to what stands folded unfolds it, also in browsers that do not by themselves.
  const unfold = () => {
    const target = document.getElementById(location.hash.slice(1));
    const folded = target && target.closest("details:not([open])");
    if (folded) { folded.open = true; target.scrollIntoView(); }
  };
  window.addEventListener("hashchange", unfold);
  unfold();

  // Maps of one run at a time.
  for (const menu of document.querySelectorAll("select.runs")) {
    const figures = menu.closest(".chapter").querySelectorAll("figure[data-run]");
    menu.addEventListener("change", () => { for (const figure of figures) figure.hidden = figure.dataset.run !== menu.value; });
  }

  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details:not(:has(pre))")) details.open = true;
  });

  const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const element = (name, className, text) => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const short = (value) => value.toPrecision(3).replace(/^-/, "−");
  // A sheet's grey levels are indices into a colour table.
  const decode = async (url) => {
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = element("canvas");
    canvas.width = image.naturalWidth;
    canvas.height = image.naturalHeight;
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    const rgba = context.getImageData(0, 0, canvas.width, canvas.height).data;
    const index = new Uint8Array(canvas.width * canvas.height);
    for (let i = 0; i < index.length; i++) index[i] = rgba[4 * i];
    return { index, width: canvas.width };
  };

  const startPlayer = (box) => {
    const data = JSON.parse(box.querySelector("script").textContent);
    const find = (selector) => box.querySelector(selector);
    const [tiles, play, frame, speed, readout] = [".tiles", ".play", ".frame", ".speed", ".readout"].map(find);
    const colors = bytes(data.colors), errorColors = bytes(data.error_colors);
    const notFinite = data.levels + 1;
    // As many as the step's length has: 820 s, not 820.00 s.
    const decimals = (String(Number(data.seconds.toPrecision(3))).split(".")[1] || "").length;
    const sheets = new Map();
    const sheet = (key, url) => {
      if (!sheets.has(key)) sheets.set(key, decode(url));
      return sheets.get(key);
    };
    // The first frame is equal for all; halfway there is something to see.
    let shown = [], current = Math.floor(data.steps.length / 2), playing = false, last = 0, drawing = 0;

    const addTile = (title, paint, note) => {
      const tile = element("figure", "tile"), canvas = element("canvas"), caption = element("figcaption");
      canvas.width = data.columns;
      canvas.height = data.rows;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", title);
      const line = element("span");
      caption.append(element("b", "", title), line);
      tile.append(canvas, caption);
      tiles.append(tile);
      return { canvas, paint, line, note };
    };
    const build = async () => {
      const ticket = ++drawing;
      const truth = await sheet("truth", data.truth);
      const chosen = [...find(".chips").querySelectorAll("input:checked")].map((input) => data.models[Number(input.value)]);
      const predicted = await Promise.all(chosen.map((model) => sheet("model:" + model.name, model.sheet)));
      if (ticket !== drawing) return;
      tiles.replaceChildren();
      shown = [addTile("truth", (i) => [truth.index[i], colors], () => "")];
      chosen.forEach((model, n) => {
        const index = predicted[n].index;
        shown.push(addTile(model.name, (i) => [index[i], colors], () => "prediction"));
        shown.push(addTile(model.name + ", error", (i) => {
          const lost = index[i] === notFinite || truth.index[i] === notFinite;
          return [lost ? notFinite : Math.min(data.levels, 2 * Math.abs(index[i] - truth.index[i])), errorColors];
        }, (k) => "relative L2 " + (model.error[k] === null ? "failed" : short(model.error[k]))));
      });
      shown.width = truth.width;
      draw();
    };
    const draw = () => {
      const left = (current % data.across) * data.columns;
      const top = Math.floor(current / data.across) * data.rows;
      for (const tile of shown) {
        const context = tile.canvas.getContext("2d");
        const image = context.createImageData(data.columns, data.rows);
        for (let row = 0, out = 0; row < data.rows; row++) {
          for (let column = 0; column < data.columns; column++, out += 4) {
            const [level, table] = tile.paint((top + row) * shown.width + left + column);
            const finite = level !== notFinite;
            for (let c = 0; c < 3; c++) image.data[out + c] = finite ? table[3 * level + c] : 140;
            image.data[out + 3] = 255;
          }
        }
        context.putImageData(image, 0, 0);
        tile.line.textContent = tile.note(current);
      }
      const step = data.steps[current];
      frame.value = String(current);
      frame.setAttribute("aria-valuetext", "step " + step);
      readout.textContent = `step ${step} · ${(step * data.seconds).toFixed(decimals)} ${data.time_unit}`;
      box.dataset.frame = String(current);
    };
    const go = (index) => { current = (index + data.steps.length) % data.steps.length; if (shown.length) draw(); };
    const tick = (now) => {
      if (!playing) return;
      if (now - last >= 1000 / Number(speed.value)) { last = now; go(current + 1); }
      requestAnimationFrame(tick);
    };
    const setPlaying = (value) => {
      if (playing === value) return;
      playing = value;
      play.textContent = playing ? "Pause" : "Play";
      if (playing) { last = 0; requestAnimationFrame(tick); }
    };
    // It plays by itself while it can be seen, until the reader takes over; not for those who want less motion.
    const calm = window.matchMedia("(prefers-reduced-motion: reduce)");
    const watcher = new IntersectionObserver((entries) => setPlaying(entries.at(-1).isIntersecting && !calm.matches), { threshold: 0.3 });
    const toggle = () => { watcher.disconnect(); setPlaying(!playing); };
    const pauseAt = (index) => { watcher.disconnect(); setPlaying(false); go(index); };

    data.models.forEach((model, n) => {
      const label = element("label"), input = element("input");
      input.type = "checkbox";
      input.value = String(n);
      input.checked = n < 2;
      input.addEventListener("change", build);
      label.append(input, " " + model.name);
      find(".chips").append(label);
    });
    const addScale = (table, low, high, name) => {
      const stops = [];
      for (let i = 0; i <= 16; i++) {
        const at = 3 * Math.round((i / 16) * data.levels);
        stops.push(`rgb(${table[at]},${table[at + 1]},${table[at + 2]})`);
      }
      const scale = element("span", "scale"), bar = element("i");
      bar.style.background = `linear-gradient(to right, ${stops.join(",")})`;
      scale.append(name, element("span", "", short(low)), bar, element("span", "", short(high)));
      find(".scales").append(scale);
    };
    addScale(colors, data.low, data.high, data.field);
    addScale(errorColors, 0, (data.high - data.low) / 2, "|error|");

    frame.max = String(data.steps.length - 1);
    frame.addEventListener("input", () => pauseAt(Number(frame.value)));
    play.addEventListener("click", toggle);
    find(".back").addEventListener("click", () => pauseAt(current - 1));
    find(".next").addEventListener("click", () => pauseAt(current + 1));
    const nudge = (by) => { speed.value = String(Number(speed.value) + by); };
    box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const control = event.target.closest("button, input, select");
      const keys = {
        "+": () => nudge(1),
        "-": () => nudge(-1),
        k: toggle,
      };
      if (!control) Object.assign(keys, {
        " ": toggle,
        ArrowRight: () => pauseAt(current + 1),
        ArrowLeft: () => pauseAt(current - 1),
        Home: () => pauseAt(0),
        End: () => pauseAt(data.steps.length - 1),
      });
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    build().then(() => watcher.observe(tiles));
  };
  document.querySelectorAll("section.player").forEach(startPlayer);
})();
