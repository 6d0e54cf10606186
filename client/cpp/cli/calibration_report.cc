// The report of a calibration: JSON, table, and a page with two charts drawn as SVG.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "cli/calibration.h"

namespace sparsegdn::cli {
namespace {

constexpr double kWidth = 620, kHeight = 300, kLeft = 70, kRight = 16, kTop = 14, kBottom = 44;
constexpr char kAlike[] = "#8a8f98", kShared[] = "#1f6fb2", kTarget[] = "#c0392b";

std::string Escaped(const std::string& text) {
  return absl::StrReplaceAll(text,
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

std::string Percent(double share) { return absl::StrFormat("%.3g %%", 100 * share); }

std::string Verdict(const Calibration& c) {
  const std::string target = absl::StrFormat("KL <= %g", c.target_kl);
  if (!c.recommended) return "No measured retention has " + target + ".";
  return absl::StrFormat("Retention %g is the smallest measured with %s%s.", *c.recommended, target,
                         c.profile.empty() ? "" : ", with the profile");
}

Json Rows(const std::vector<Measured>& rows) {
  Json found = Json::array();
  for (const Measured& row : rows) {
    found.push_back({{"retention", row.retention},
                     {"kept", row.kept},
                     {"kl", row.mean.kl},
                     {"worst_prompt_kl", row.worst_kl},
                     {"top1", row.mean.top1}});
  }
  return found;
}

// Retention on a linear axis, a quantity on a linear or logarithmic one.
class Chart {
 public:
  Chart(const Calibration& c, double low, double high, bool log)
      : most_(c.alike.front().retention), low_(low), high_(high), log_(log) {
    svg_ = absl::StrFormat(
        "<svg viewBox='0 0 %g %g' width='%g' role='img'><rect x='%g' y='%g' width='%g' height='%g' "
        "fill='none' stroke='#ccc'/>",
        kWidth, kHeight, kWidth, kLeft, kTop, kWidth - kLeft - kRight, kHeight - kTop - kBottom);
    double labelled = 2 * kWidth;
    for (const Measured& row : c.alike) {
      absl::StrAppendFormat(&svg_, "<line x1='%.1f' x2='%.1f' y1='%g' y2='%g' stroke='#eee'/>",
                            X(row.retention), X(row.retention), kTop, kHeight - kBottom);
      if (labelled - X(row.retention) < 36) continue;  // labels must not touch
      labelled = X(row.retention);
      Text(labelled, kHeight - kBottom + 16, "middle", Percent(row.retention));
    }
    Text((kLeft + kWidth - kRight) / 2, kHeight - 6, "middle", "retention");
  }
  double X(double share) const {
    return kLeft + 10 + (kWidth - kLeft - kRight - 20) * share / most_;
  }
  double Y(double value) const {
    const auto scale = [this](double v) { return log_ ? std::log(v) : v; };
    const double part =
        (scale(std::clamp(value, low_, high_)) - scale(low_)) / (scale(high_) - scale(low_));
    return kHeight - kBottom - (kHeight - kTop - kBottom) * part;
  }
  void Text(double x, double y, const char* anchor, const std::string& text) {
    absl::StrAppendFormat(&svg_, "<text x='%.1f' y='%.1f' text-anchor='%s'>%s</text>", x, y, anchor,
                          text);
  }
  void Tick(double value) {
    absl::StrAppendFormat(&svg_, "<line x1='%g' x2='%g' y1='%.1f' y2='%.1f' stroke='#eee'/>", kLeft,
                          kWidth - kRight, Y(value), Y(value));
    Text(kLeft - 6, Y(value) + 4, "end", absl::StrFormat("%g", value));
  }
  void Level(double value, const char* colour) {
    absl::StrAppendFormat(
        &svg_, "<line x1='%g' x2='%g' y1='%.1f' y2='%.1f' stroke='%s' stroke-dasharray='6 4'/>",
        kLeft, kWidth - kRight, Y(value), Y(value), colour);
  }
  void Line(const std::vector<Measured>& rows, double (*value)(const Measured&),
            const char* colour) {
    std::string points;
    for (const Measured& row : rows) {
      absl::StrAppendFormat(&points, "%.1f,%.1f ", X(row.retention), Y(value(row)));
      absl::StrAppendFormat(&svg_, "<circle cx='%.1f' cy='%.1f' r='3.5' fill='%s'/>",
                            X(row.retention), Y(value(row)), colour);
    }
    absl::StrAppendFormat(&svg_, "<polyline points='%s' fill='none' stroke='%s' stroke-width='2'/>",
                          points, colour);
  }
  std::string Take() { return svg_ + "</svg>"; }

 private:
  double most_, low_, high_;
  bool log_;
  std::string svg_;
};

double Kl(const Measured& row) { return row.mean.kl; }
double Top1(const Measured& row) { return row.mean.top1; }

std::string KlChart(const Calibration& c) {
  double low = c.target_kl, high = c.target_kl;
  for (const auto* rows : {&c.alike, &c.shared}) {
    for (const Measured& row : *rows) {
      low = std::min(low, std::max(row.mean.kl, 1e-6));
      high = std::max(high, row.mean.kl);
    }
  }
  low = std::pow(10.0, std::floor(std::log10(low)));
  high = std::max(10 * low, std::pow(10.0, std::ceil(std::log10(high))));
  Chart chart(c, low, high, true);
  for (double tick = low; tick <= high * 1.01; tick *= 10) chart.Tick(tick);
  chart.Level(c.target_kl, kTarget);
  chart.Line(c.alike, Kl, kAlike);
  if (!c.profile.empty()) chart.Line(c.shared, Kl, kShared);
  return chart.Take();
}

std::string Top1Chart(const Calibration& c) {
  double low = 1;
  for (const auto* rows : {&c.alike, &c.shared}) {
    for (const Measured& row : *rows) low = std::min(low, row.mean.top1);
  }
  const double step = 1 - low > 0.25 ? 0.1 : 1 - low > 0.05 ? 0.05 : 0.01;
  low = std::max(0.0, step * std::floor((low - 1e-9) / step));
  Chart chart(c, low, 1, false);
  for (double tick = low; tick < 1 + step / 2; tick += step) {
    chart.Tick(std::round(tick * 100) / 100);
  }
  chart.Line(c.alike, Top1, kAlike);
  if (!c.profile.empty()) chart.Line(c.shared, Top1, kShared);
  return chart.Take();
}

std::string Legend(const Calibration& c) {
  const auto item = [](const char* colour, const char* text) {
    return absl::StrFormat("<span style='color:%s'>&#9632;</span> %s &nbsp; ", colour, text);
  };
  std::string text = item(kAlike, c.profile.empty() ? "measured" : "layers alike");
  if (!c.profile.empty()) text += item(kShared, "with the profile");
  return text + item(kTarget, "target");
}

std::string BudgetRows(const Calibration& c) {
  const auto cells = [](const Measured& row) {
    return absl::StrFormat("<td>%.5f<td>%.5f<td>%.2f %%", row.mean.kl, row.worst_kl,
                           100 * row.mean.top1);
  };
  std::string text;
  for (size_t i = 0; i < c.alike.size(); ++i) {
    const bool chosen = c.recommended && *c.recommended == c.alike[i].retention;
    absl::StrAppend(&text, chosen ? "<tr class=chosen>" : "<tr>", "<td>",
                    Percent(c.alike[i].retention), cells(c.alike[i]),
                    c.profile.empty() ? "" : cells(c.shared[i]));
  }
  return text;
}

std::string LayerRows(const Calibration& c) {
  double most = 1e-12;
  for (const double kl : c.layer_kl) most = std::max(most, kl);
  std::string text;
  for (size_t i = 0; i < c.layer_kl.size(); ++i) {
    absl::StrAppendFormat(&text,
                          "<tr><td>%d<td>%.5f<td class=bar><div style='width:%.2fem'></div>"
                          "<td>%.3f",
                          c.layers[i], c.layer_kl[i], 14 * c.layer_kl[i] / most,
                          c.profile.empty() ? 1.0 : c.profile[i]);
  }
  return text;
}

constexpr char kStyle[] =
    "body{font:15px/1.5 sans-serif;margin:2em auto;max-width:66em;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .9em;text-align:right}"
    "th{border-bottom:1px solid #999;font-weight:600}.chosen{background:#d8f0d8}"
    ".bar div{background:#1f6fb2;height:.8em}.verdict{font-size:1.25em;font-weight:600}"
    "svg{max-width:100%}svg text{font:12px sans-serif;fill:#444}"
    ".charts{display:flex;flex-wrap:wrap;gap:1em}.charts>div{flex:1 1 26em}"
    "code{background:#f2f2f2;padding:.1em .3em}";

std::string NextSteps(const Calibration& c) {
  if (!c.recommended) {
    return "<p>Serve dense, measure higher retentions (<code>--retentions</code>), or accept a "
           "larger KL.";
  }
  return absl::StrFormat(
      "<p>Serve so: <code>sparsegdn-server --model DIR%s --default-retention %g</code>, or per "
      "request: "
      "<code>sparsegdn prefill --retention %g</code>.",
      c.profile.empty() ? "" : " --budget-profile budget_profile.json", *c.recommended,
      *c.recommended);
}

}  // namespace

Json CalibrationJson(const Calibration& c) {
  Json json = {{"model", c.info.model_name()},
               {"identity", c.info.model_identity()},
               {"backend", c.info.backend()},
               {"prompts", c.prompts},
               {"tokens", c.tokens},
               {"target_kl", c.target_kl},
               {"recommended_retention", nullptr},
               {"profile", nullptr},
               {"alike", Rows(c.alike)},
               {"shared", Rows(c.shared)},
               {"layers", c.layers},
               {"layer_kl", c.layer_kl},
               {"layer_retention", c.layer_retention}};
  if (c.recommended) json["recommended_retention"] = *c.recommended;
  if (!c.profile.empty()) json["profile"] = c.profile;
  return json;
}

Json ProfileJson(const Calibration& c) {
  return {{"relative_retention", c.profile},
          {"about",
           {{"model", c.info.model_name()},
            {"identity", c.info.model_identity()},
            {"prompts", c.prompts},
            {"tokens", c.tokens}}}};
}

std::string CalibrationTable(const Calibration& c) {
  const bool profile = !c.profile.empty();
  std::string text = absl::StrFormat("%-10s %9s %9s %7s", "retention", "KL", "worst", "top-1");
  if (profile) absl::StrAppend(&text, "   with the profile: KL  worst  top-1");
  absl::StrAppend(&text, "\n");
  for (size_t i = 0; i < c.alike.size(); ++i) {
    const Measured& a = c.alike[i];
    absl::StrAppendFormat(&text, "%-10g %9.5f %9.5f %6.2f%%", a.retention, a.mean.kl, a.worst_kl,
                          100 * a.mean.top1);
    if (profile) {
      const Measured& b = c.shared[i];
      absl::StrAppendFormat(&text, "          %9.5f %9.5f %6.2f%%", b.mean.kl, b.worst_kl,
                            100 * b.mean.top1);
    }
    absl::StrAppend(&text, "\n");
  }
  return absl::StrCat(text, Verdict(c), "\n");
}

std::string CalibrationPage(const Calibration& c) {
  const bool profile = !c.profile.empty();
  std::string page = absl::StrCat(
      "<!doctype html><html lang=en><meta charset=utf-8><title>SparseGDN "
      "calibration</title><style>",
      kStyle, "</style>\n<h1>What sparse prefill costs ", Escaped(c.info.model_name()), "</h1>\n");
  absl::StrAppend(&page, "<p class=verdict>", Escaped(Verdict(c)), "\n<p>", Grouped(c.prompts),
                  " prompts, ", Grouped(c.tokens), " tokens, ", Escaped(c.info.backend()),
                  " backend, model identity ", Escaped(c.info.model_identity().substr(0, 16)),
                  ".\n", NextSteps(c),
                  "\n<div class=charts><div><h2>KL from dense, nats a token</h2>", KlChart(c),
                  "</div><div><h2>Same most likely token as dense</h2>", Top1Chart(c),
                  "</div></div>\n<p>", Legend(c), "\n<h2>Figures</h2><table><tr><th>retention");
  for (const char* name : {"", ", profile"}) {
    if (*name != '\0' && !profile) continue;
    absl::StrAppend(&page, "<th>KL", name, "<th>worst prompt<th>top-1");
  }
  absl::StrAppend(&page, BudgetRows(c), "</table>\n");
  if (!c.layer_kl.empty()) {
    absl::StrAppend(&page, "<h2>Each GDN layer sparse alone, at ", Percent(c.layer_retention),
                    "</h2><table><tr><th>layer<th>KL<th><th>weight in the profile", LayerRows(c),
                    "</table>\n");
  }
  return page;
}

}  // namespace sparsegdn::cli
