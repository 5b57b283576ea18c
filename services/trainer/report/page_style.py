"""The style sheet of the pages: light and dark by the reader's setting, on paper, and from 320 pixels of width on."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --back: #fbfbfa; --card: #fff; --text: #1d2126; --quiet: #59626d; --line: #e2e4e7;
  --grid: #ecedef; --accent: #1f5fbf; --bar: #e7ecf4; --mark: #7a828c; --bad: #b42318; --good: #1a7f4b; --warn: #9a5b00;
  --c0: #1f66c9; --c1: #c2500a; --c2: #1a7f4b; --c3: #7a3fb8; --c4: #b0256f; --c5: #0b7a8a; --c6: #806600;
    --c7: #54606e }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1b1f24; --text: #e6e8eb; --quiet: #a3acb7;
  --line: #2f353d; --grid: #282d34; --accent: #7cb0ff; --bar: #2a3442; --mark: #8b95a1; --bad: #ff8a7d; --good: #5fd095;
  --warn: #f0b45a; --c0: #6aa9ff; --c1: #ff9a5c; --c2: #5fd095; --c3: #c59cff; --c4: #ff8cc0; --c5: #55cfe0;
  --c6: #dcc04a; --c7: #aab4c0 } }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100% }
body { margin: 0 auto; max-width: 1240px; padding: 28px 24px 64px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: anywhere }
header p { margin: 0; color: var(--quiet) }
h1 { margin: 0 0 20px; font-size: 26px; line-height: 1.25; font-weight: 650; letter-spacing: -.01em }
h2 { margin: 44px 0 6px; font-size: 19px; font-weight: 650; letter-spacing: -.005em }
h3 { margin: 0; font-size: 15px; font-weight: 650 }
h3 small { font-weight: 400; color: var(--quiet); font-size: 13px; margin-left: 4px }
p.lead { margin: 0 0 14px; color: var(--quiet); max-width: 76ch }
a { color: var(--accent) }
.skip { position: absolute; left: -9999px }
.skip:focus { left: 16px; top: 8px; background: var(--card); padding: 6px 10px; border-radius: 6px; z-index: 3 }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }

.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px; margin: 0 }
.tiles > div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px }
.tiles dt { color: var(--quiet); font-size: 13px }
.tiles dd { margin: 2px 0 0; font-size: 22px; line-height: 1.3; font-weight: 620; font-variant-numeric: tabular-nums }
.tiles small { display: block; margin-top: 3px; font-size: 12.5px; line-height: 1.4; font-weight: 400;
    color: var(--quiet) }
.bar { display: block; height: 5px; margin: 7px 0 5px; border-radius: 3px; background: var(--bar); overflow: hidden }
.bar > span { display: block; height: 100%; border-radius: 3px; background: var(--c0) }

.choice { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 26px 0 14px }
.choice fieldset { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 2px; border: 0; padding: 0; margin: 0 }
.choice legend { float: left; padding: 0 10px 0 0; color: var(--quiet); font-size: 13px }
.choice label { position: relative; font-size: 13px }
.choice input { position: absolute; opacity: 0; inset: 0; margin: 0; cursor: pointer }
.choice span { display: block; padding: 3px 10px; border-radius: 7px; border: 1px solid transparent;
    color: var(--text) }
.choice input:checked + span { background: var(--card); border-color: var(--mark); font-weight: 600 }
.choice input:focus-visible + span { outline: 2px solid var(--accent); outline-offset: 1px }

.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(460px, 100%), 1fr)); gap: 16px }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 18px 12px; min-width: 0; display: flex; flex-direction: column; break-inside: avoid }
figure.wide, figure.row { grid-column: 1 / -1 }
figcaption { margin-bottom: auto }
figcaption p { margin: 2px 0 8px; font-size: 13px; line-height: 1.45; color: var(--quiet); max-width: 84ch }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 0; margin: 0 0 10px;
    font-size: 13px }
.legend li { display: inline-flex; align-items: center; gap: 6px }
.legend b { font-weight: 600; font-variant-numeric: tabular-nums }
.legend i { flex: none; width: 16px; height: 0; border-top: 2.5px solid var(--c, var(--mark)) }
.legend .dot { width: 8px; height: 8px; border: 0; border-radius: 50%; background: var(--c, var(--mark)) }
.legend .reference i, .legend .restart i, .legend .rollback i { border-top-style: dashed; border-top-width: 1.5px }
.plot { position: relative; display: grid; grid-template-columns: auto minmax(0, 1fr); min-height: 0 }
.plot svg { grid-column: 2; width: 100%; height: 190px; display: block; overflow: visible }
.wide .plot svg { height: 320px }
.ticks { position: relative; font-size: 12px; line-height: 1; color: var(--quiet); font-variant-numeric: tabular-nums }
.ticks.down { width: 52px }
.ticks.down span { position: absolute; right: 8px; transform: translateY(50%); white-space: nowrap }
.ticks.across { grid-column: 2; height: 16px; margin-top: 6px }
.ticks.across span { position: absolute; transform: translateX(-50%); white-space: nowrap }
.plot .axis { grid-column: 2; margin: 2px 0 0; font-size: 12px; color: var(--quiet); text-align: center }
svg path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round }
.grid { stroke: var(--grid); stroke-width: 1px }
.curve { stroke: var(--c); stroke-width: 2px }
.curve.faint { stroke-width: 1px; opacity: .38 }
.dots { stroke: var(--c); stroke-width: 7px; stroke-linecap: round }
.error { stroke: var(--c); stroke-width: 1.5px; opacity: .6 }
.reference { stroke: var(--mark); stroke-width: 1.5px; stroke-dasharray: 6 4 }
.mark { stroke: var(--mark); stroke-width: 1px }
.restart { stroke: var(--warn); stroke-dasharray: 4 4; --c: var(--warn) }
.rollback { stroke: var(--bad); stroke-dasharray: 8 4; --c: var(--bad) }
.skipped { stroke: var(--bad); stroke-width: 2px; --c: var(--bad) }
.straggler { stroke: var(--c3); stroke-dasharray: 2 5; --c: var(--c3) }
.checkpoint { stroke: var(--good); stroke-width: 2px; --c: var(--good) }
.c0 { --c: var(--c0) } .c1 { --c: var(--c1) } .c2 { --c: var(--c2) } .c3 { --c: var(--c3) }
.c4 { --c: var(--c4) } .c5 { --c: var(--c5) } .c6 { --c: var(--c6) } .c7 { --c: var(--c7) }

.variant { display: none }
:root:has(#x-step:checked):has(#y-linear:checked) .x-step.y-linear,
:root:has(#x-log:checked):has(#y-linear:checked) .x-log.y-linear,
:root:has(#x-tokens:checked):has(#y-linear:checked) .x-tokens.y-linear,
:root:has(#x-time:checked):has(#y-linear:checked) .x-time.y-linear,
:root:has(#x-step:checked):has(#y-logarithmic:checked) .x-step.y-logarithmic,
:root:has(#x-log:checked):has(#y-logarithmic:checked) .x-log.y-logarithmic,
:root:has(#x-tokens:checked):has(#y-logarithmic:checked) .x-tokens.y-logarithmic,
:root:has(#x-time:checked):has(#y-logarithmic:checked) .x-time.y-logarithmic { display: grid }
@supports not selector(:has(a)) { .x-step.y-linear { display: grid } .choice { display: none } }
.pointer { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--mark); pointer-events: none }
.hint { position: absolute; top: 4px; padding: 5px 9px; border-radius: 6px; background: var(--text); color: var(--back);
  font-size: 12px; line-height: 1.45; pointer-events: none; white-space: nowrap; z-index: 2 }

.frame { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
    margin: 0 0 16px }
.frame.long { max-height: 460px; overflow-y: auto }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums }
caption { text-align: left; font-weight: 650 }
caption span { position: sticky; left: 0; display: block; width: max-content; max-width: calc(100vw - 60px);
    padding: 12px 16px 6px }
th, td { text-align: left; vertical-align: top; padding: 6px 16px; border-top: 1px solid var(--line); font-weight: 400;
  min-width: 84px }
thead th { border-top: 0; color: var(--quiet); font-size: 13px; white-space: nowrap }
tbody th { font-weight: 550; min-width: 120px }
pre { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace }
details { margin: 0 0 16px }
summary { cursor: pointer; padding: 4px 0 10px; font-weight: 550; color: var(--accent) }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 0 16px;
    align-items: start }

.lanes { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 8px 14px; align-items: center;
    font-size: 13px }
.lane { display: flex; height: 26px; border-radius: 5px; background: var(--bar); overflow: hidden }
.lane > span { height: 100%; border-right: 1px solid var(--card); background: var(--c) }
.lane > span:nth-child(even) { opacity: .62 }
.lanes .when { color: var(--quiet); grid-column: 2; margin: -4px 0 6px; font-size: 12.5px }

@media (max-width: 520px) {
  body { padding: 18px 14px 48px }
  h1 { font-size: 21px }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px }
  .tiles dd { font-size: 18px }
  figure { padding: 14px 12px 10px }
  .wide .plot svg { height: 220px }
  .ticks.down { width: 46px }
  th, td { padding: 6px 10px }
}
@media print {
  :root { --back: #fff; --card: #fff; --text: #000; --quiet: #444; --line: #ccc; --grid: #e4e4e4; --mark: #777;
    --bar: #eee; --c0: #1f66c9; --c1: #c2500a; --c2: #1a7f4b; --c3: #7a3fb8; --c4: #b0256f; --c5: #0b7a8a;
    --c6: #806600;
    --c7: #54606e; --bad: #b42318; --good: #1a7f4b; --warn: #9a5b00 }
  body { max-width: none; padding: 0; font-size: 12px }
  .skip, .hint, .pointer, .choice { display: none }
  .frame, .frame.long { overflow: visible; max-height: none }
  .charts { grid-template-columns: 1fr 1fr }
  th, td { min-width: 0; padding: 4px 6px; font-size: 10.5px; overflow-wrap: anywhere }
  thead th { white-space: normal }
  h2 { break-after: avoid }
  .tiles > div, tr { break-inside: avoid }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact }
}
"""
