#include <algorithm>

#include "core.h"

namespace helixpipe {

Lists Log::lists(int keys) const {
  Lists made;
  made.first.assign(keys + 1, 0);
  for (const int key : keys_) ++made.first[key + 1];
  for (int key = 0; key < keys; ++key) made.first[key + 1] += made.first[key];
  made.items.resize(values_.size());
  Numbers next(made.first.begin(), made.first.end() - 1);
  for (std::size_t at = 0; at < keys_.size(); ++at) made.items[next[keys_[at]]++] = values_[at];
  return made;
}

Tables::Tables(std::vector<std::string> kinds, std::vector<TransferRow> own, Flags weights)
    : buffer_kinds(std::move(kinds)), rows(std::move(own)), of_weights(std::move(weights)) {
  activation = buffer_kind("activation");
  gradient = buffer_kind("gradient");
  saved = buffer_kind("saved");
  recomputed = buffer_kind("recomputed");
  deferred = buffer_kind("deferred");
  offloaded = buffer_kind("offloaded");
  fetched = buffer_kind("fetched");
  keys_values = buffer_kind("keys_values");
  kv_gradients = buffer_kind("kv_gradients");
  workspace = buffer_kind("workspace");
  activation_sent = transfer_kind("activation");
  gradient_sent = transfer_kind("gradient");
  weight_gradients_sent = transfer_kind("weight_gradients");
}

int Tables::buffer_kind(const std::string& name) const {
  const auto at = std::find(buffer_kinds.begin(), buffer_kinds.end(), name);
  if (at == buffer_kinds.end()) throw std::invalid_argument("no kind of buffer: " + name);
  return static_cast<int>(at - buffer_kinds.begin());
}

int Tables::transfer_kind(const std::string& name) const {
  const auto at = std::find_if(rows.begin(), rows.end(), [&](const TransferRow& row) { return row.name == name; });
  if (at == rows.end()) throw std::invalid_argument("no kind of transfer: " + name);
  return static_cast<int>(at - rows.begin());
}

bool Index::whole_units(bool forward_only, const Flags& recomputes) const {
  for (int unit = 0; unit < per_stage * num_stages; ++unit) {
    const auto has = [&](OpKind kind) { return tasks[kind][unit] >= 0; };
    if (!has(kForward)) return false;
    if (forward_only) {
      if (has(kBackward) || has(kInput) || has(kWeight) || has(kRecompute)) return false;
    } else {
      if (has(kInput) != has(kWeight) || has(kBackward) == has(kInput)) return false;
      if (has(kRecompute) && !recomputes[unit]) return false;
    }
  }
  for (int task = 0; task < num_ops(); ++task) {
    if (rank[task] != rank[tasks[kForward][unit[task]]]) return false;
  }
  return true;
}

bool Index::together(int stage) const {
  const int* forwards = tasks[kForward].data() + static_cast<std::size_t>(stage) * per_stage;
  return std::all_of(forwards, forwards + per_stage, [&](int task) { return rank[task] == rank[forwards[0]]; });
}

bool Index::together(int stage, const std::vector<Numbers>& rows) const {
  const int* forwards = tasks[kForward].data() + static_cast<std::size_t>(stage) * per_stage;
  for (const Numbers& places : rows) {
    for (const int place : places) {
      if (rank[forwards[place]] != rank[forwards[places[0]]]) return false;
    }
  }
  return true;
}

}  // namespace helixpipe
