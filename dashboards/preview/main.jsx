// Draws window.PREVIEW, a generated dashboard and what a Prometheus answered to its queries, with the
// components and display rules of Grafana's UI library. A state timeline is not part of that library:
// its bands are drawn here, in the colours that the library's display rules give.
import {
  EventBusSrv, FieldColorModeId, FieldType, applyFieldOverrides, createTheme, dateTime,
  getDisplayProcessor, getFieldDisplayName, standardFieldConfigEditorRegistry, toDataFrame,
} from '@grafana/data';
import { BarGauge, BigValue, GlobalStyles, PanelChrome, PanelContextProvider, TimeSeries } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

const COLUMN = 64, ROW = 38, GAP = 8;
const theme = createTheme({ colors: { mode: 'dark' } });
const { dashboard, answers, from, to, step } = window.PREVIEW;
const bus = new EventBusSrv();
const timeRange = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: 'now-1h', to: 'now' } };
const OPTIONS = ['unit', 'min', 'max', 'decimals', 'mappings', 'thresholds', 'color', 'noValue', 'displayName'];

standardFieldConfigEditorRegistry.setInit(() => OPTIONS.map((id) => ({
  id, path: id, name: id, process: (value) => value, shouldApply: () => true,
})));

const nameOf = (legend, labels) => legend.replace(/{{\s*(\w+)\s*}}/g, (_, key) => labels[key] ?? '');

// Every step of the page, with null where Prometheus has nothing: lines end there.
function pointsOf(target, series) {
  const known = series.values.map(([time, value]) => [Math.round((time - from) / step), value === 'NaN' ? null : Number(value)]);
  if (target.instant) {
    return known;
  }
  const values = new Map(known);
  return Array.from({ length: Math.floor((to - from) / step) + 1 }, (_, at) => [at, values.get(at) ?? null]);
}

function framesOf(panel) {
  const frames = panel.targets.flatMap((target) => answers[panel.id][target.refId].map((series) => {
    const points = pointsOf(target, series);
    return toDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: points.map(([at]) => (from + at * step) * 1000) },
        {
          name: 'Value', type: FieldType.number, values: points.map(([, value]) => value),
          config: { displayNameFromDS: nameOf(target.legendFormat, series.metric) },
        },
      ],
    });
  }));
  const color = { mode: FieldColorModeId.PaletteClassic, ...panel.fieldConfig.defaults.color };
  const shown = applyFieldOverrides({
    data: frames, theme, timeZone: 'utc', replaceVariables: (text) => text,
    fieldConfig: { defaults: { ...panel.fieldConfig.defaults, color }, overrides: [] },
  });
  // What only one kind of panel knows (lines, stacks, thresholds) is not in the common rules.
  for (const { fields } of shown) {
    fields[1].config.custom = panel.fieldConfig.defaults.custom;
  }
  return shown;
}

const Nothing = ({ height }) => <div style={{ textAlign: 'center', paddingTop: height / 3 }}>No data</div>;

function lastOf(frame) {
  const field = frame.fields[1];
  field.display ??= getDisplayProcessor({ field, theme });
  const shown = field.display(field.values.findLast((value) => value !== null));
  return { field, shown, name: getFieldDisplayName(field, frame) };
}

function Stat({ panel, frames, width, height }) {
  const { colorMode, textMode } = panel.options;
  const values = frames.map(lastOf).map(({ shown, name }) => (
    textMode === 'name' ? { ...shown, text: name, prefix: '', suffix: '', color: undefined } : shown
  ));
  const all = values.length ? values : [{ text: 'none', numeric: NaN }];
  return all.map((value, index) => (
    <BigValue key={index} theme={theme} value={value} width={width} height={height / all.length}
      colorMode={textMode === 'name' ? 'none' : colorMode} graphMode="none" justifyMode="auto" textMode="value" />
  ));
}

function Bars({ frames, width, height }) {
  const each = Math.min(28, height / frames.length - 4);
  const bars = frames.map(lastOf);
  const max = Math.max(...bars.map(({ shown }) => shown.numeric));
  return bars.map(({ field, shown, name }, index) => (
    <div key={index} style={{ marginBottom: 4 }}>
      <BarGauge theme={theme} width={width} height={each} orientation="horizontal" displayMode="basic"
        value={{ ...shown, title: name }} field={{ max, ...field.config }} display={field.display} />
    </div>
  ));
}

// Runs of one value, each as [from, to, value], times in seconds.
function runsOf({ fields: [{ values: times }, { values }] }) {
  const runs = [];
  for (let at = 0; at < times.length; at += 1) {
    if (values[at] === null) {
      continue;
    }
    const begin = times[at] / 1000;
    const last = runs[runs.length - 1];
    if (last && last[2] === values[at] && begin - last[1] < 0.1) {
      last[1] = begin + step;
    } else {
      runs.push([begin, begin + step, values[at]]);
    }
  }
  return runs;
}

function Bands({ frames, width }) {
  const label = 190;
  const x = (time) => ((time - from) / (to - from)) * (width - label);
  return frames.map((frame, index) => {
    const { field, name } = lastOf(frame);
    return (
      <div key={index} style={{ position: 'relative', height: 34, fontSize: 12 }}>
        <div style={{ width: label, overflow: 'hidden', whiteSpace: 'nowrap', lineHeight: '30px' }}>{name}</div>
        {runsOf(frame).map(([begin, end, value]) => (
          <div key={begin} style={{
            position: 'absolute', top: 2, height: 28, opacity: 0.8, background: field.display(value).color,
            left: label + x(begin), width: Math.max(1, x(Math.min(end, to)) - x(begin)),
          }} />
        ))}
      </div>
    );
  }).concat([
    <div key="key" style={{ fontSize: 12, marginTop: 6 }}>
      {Object.values(frames[0]?.fields[1].config.mappings?.[0]?.options ?? {}).map(({ text, color }) => (
        <span key={text} style={{ marginRight: 14 }}>
          <span style={{ display: 'inline-block', width: 14, height: 4, marginRight: 5, verticalAlign: 'middle', background: theme.visualization.getColorByName(color) }} />
          {text}
        </span>
      ))}
    </div>,
  ]);
}

function Graph({ panel, frames, width, height }) {
  return (
    <TimeSeries frames={frames} width={width} height={height} timeRange={timeRange} timeZone="utc"
      structureRev={1} options={panel.options} legend={panel.options.legend} />
  );
}

const KINDS = { stat: Stat, bargauge: Bars, 'state-timeline': Bands, timeseries: Graph };

function Panel({ panel }) {
  const { x, y, w, h } = panel.gridPos;
  const box = { position: 'absolute', left: x * COLUMN, top: y * ROW, width: w * COLUMN - GAP, height: h * ROW - GAP };
  if (panel.type === 'row') {
    return <div style={{ ...box, height: ROW, fontSize: 16, fontWeight: 500, paddingTop: 8 }}>{panel.title}</div>;
  }
  const Kind = KINDS[panel.type];
  const frames = framesOf(panel);
  return (
    <div style={box}>
      <PanelChrome width={box.width} height={box.height} title={panel.title} description={panel.description}>
        {(width, height) => (
          frames.length || panel.type === 'stat'
            ? <Kind panel={panel} frames={frames} width={width} height={height} />
            : <Nothing height={height} />
        )}
      </PanelChrome>
    </div>
  );
}

function Page() {
  const bottom = Math.max(...dashboard.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  return (
    <PanelContextProvider value={{ eventBus: bus, eventsScope: 'preview', sync: () => 0 }}>
      <GlobalStyles />
      <div style={{ padding: 16 }}>
        <div style={{ fontSize: 20 }}>{dashboard.title}</div>
        <div style={{ opacity: 0.7, marginBottom: 8 }}>
          {dashboard.description} Rendered with Grafana&apos;s UI library, not a Grafana server.
        </div>
        <div style={{ position: 'relative', height: bottom * ROW }}>
          {dashboard.panels.map((panel) => <Panel key={panel.id ?? panel.title} panel={panel} />)}
        </div>
      </div>
    </PanelContextProvider>
  );
}

document.body.style.background = theme.colors.background.canvas;
createRoot(document.getElementById('page')).render(<Page />);
