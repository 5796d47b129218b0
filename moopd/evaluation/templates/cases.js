(() => {
  const book = JSON.parse(document.getElementById("case-data").textContent);
  const titles = JSON.parse(document.getElementById("case-titles").textContent);
  const places = JSON.parse(document.getElementById("case-places").textContent);
  const pick = Object.fromEntries(["question", "left", "right"].map((k) => [k, document.getElementById(`case-${k}`)]));
  const view = document.getElementById("case-view");
  if (!book.cases.length) return;

  const make = (tag, options = {}, ...children) => {
    const node = document.createElement(tag);
    if (options.cls) node.className = options.cls;
    if (options.text !== undefined) node.textContent = options.text;
    if (options.open) node.open = true;
    node.append(...children.filter(Boolean));
    return node;
  };
  // Text with every accepted answer marked; built from nodes, so that no record can act as HTML.
  const marked = (text, answers) => {
    const span = make("span");
    const wanted = answers.filter((a) => a.length > 1).map((a) => a.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    if (!wanted.length) { span.textContent = text; return span; }
    const pattern = new RegExp(`(?<![\\p{L}\\p{N}])(${wanted.join("|")})(?![\\p{L}\\p{N}])`, "giu");
    text.split(pattern).forEach((piece, n) => span.append(n % 2 ? make("mark", { text: piece }) : piece));
    return span;
  };
  const search = (one, answers) => {
    const box = make("details", { cls: "passages" });
    box.append(make("summary", { cls: "query", text: one.query }));
    if (one.error) box.append(make("p", { cls: "bad", text: `retrieval failed: ${one.error}` }));
    for (const id of one.passages) {
      const passage = book.passages[id];
      box.append(make("p", {}, make("b", { text: `${passage.title} ` }), marked(passage.text, answers)));
    }
    if (!one.passages.length && !one.error) box.append(make("p", { text: "no passage found" }));
    return box;
  };
  const report = (one, answers) => {
    const box = make("div", { cls: one.selected ? "report" : "report unused" });
    box.append(make("span", { cls: "tag", text: `report ${one.id}${one.selected ? "" : ", not selected"}` }));
    box.append(marked(one.text, answers));
    return box;
  };
  const attempt = (one, number, answers) => {
    const box = make("details", { cls: one.correct ? "attempt right" : "attempt", open: number === 0 });
    const said = one.answer === null ? "no answer" : one.answer;
    const why = one.correct ? "correct" : places[one.place] || "wrong";
    box.append(make("summary", {}, make("b", { text: said }), ` · attempt ${number + 1} · ${why}`));
    for (const round of one.rounds) {
      if (one.rounds.length > 1) box.append(make("p", { cls: "round", text: `round ${round.number}` }));
      for (const subtask of round.subtasks) {
        const part = make("div", { cls: "subtask" }, make("div", { text: subtask.text }));
        subtask.searches.forEach((s) => part.append(search(s, answers)));
        subtask.reports.forEach((r) => part.append(report(r, answers)));
        if (!subtask.searches.length) part.append(make("span", { cls: "tag", text: "no search" }));
        if (!subtask.reports.length) part.append(make("span", { cls: "tag", text: "no report" }));
        box.append(part);
      }
    }
    if (one.answer === null) box.append(make("div", { cls: "report", text: one.output || `no Answerer output (${one.stop})` }));
    return box;
  };
  const side = (one, name) => {
    const attempts = one.attempts[name] || [];
    const right = attempts.filter((a) => a.correct).length;
    const box = make("div");
    box.append(make("h4", {}, titles[name], make("small", { text: ` ${right} of ${attempts.length} right` })));
    attempts.forEach((a, n) => box.append(attempt(a, n, one.answers)));
    return box;
  };
  const show = () => {
    const one = book.cases[Number(pick.question.value)];
    view.replaceChildren(
      make("p", {}, make("b", { text: one.question }), make("br"),
        make("span", { cls: "soft", text: `${one.dataset} · accepted: ${one.answers.join(" | ")}` })),
      make("div", { cls: "sides" }, side(one, pick.left.value), side(one, pick.right.value)),
    );
  };
  book.cases.forEach((one, n) => pick.question.add(new Option(`${one.dataset}: ${one.question}`, n)));
  Object.values(pick).forEach((box) => box.addEventListener("change", show));
  show();
})();
