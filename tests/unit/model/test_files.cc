#include "tests/unit/model/test_files.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "server/model/safetensors_header.h"
#include "tests/unit/model/model_testing.h"

namespace sparsegdn::model::testing {

TempDir::TempDir() {
  std::string pattern = ::testing::TempDir() + "sparsegdn-model-XXXXXX";
  path_ = mkdtemp(pattern.data());
}
TempDir::~TempDir() { std::filesystem::remove_all(path_); }

void TempDir::Write(const std::string& name, const std::string& content) const {
  std::ofstream(File(name), std::ios::binary) << content;
}
std::string TempDir::Read(const std::string& name) const {
  std::ostringstream content;
  content << std::ifstream(File(name), std::ios::binary).rdbuf();
  return content.str();
}

void CopyModel(const std::string& name, const TempDir& to) {
  for (const auto& file : std::filesystem::directory_iterator(ModelDir(name))) {
    const std::string base = file.path().filename().string();
    if (base[0] != '.') std::filesystem::copy_file(file.path(), to.File(base));
  }
}

std::string SafetensorsFile(const std::string& header, const std::string& data) {
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(uint64_t{header.size()} >> (8 * i));
  return file + header + data;
}

Editable::Editable(const std::string& file) {
  const std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(file.data()), file.size());
  const auto parsed = ParseSafetensorsHeader(bytes, bytes.size());
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  if (!parsed.ok()) return;
  for (const SafetensorsEntry& e : *parsed) {
    entries.push_back({e.name, e.dtype, e.shape, file.substr(e.begin, e.end - e.begin)});
  }
}

Editable::Entry& Editable::at(const std::string& name) {
  for (Entry& entry : entries) {
    if (entry.name == name) return entry;
  }
  ADD_FAILURE() << "no tensor " << name;
  return entries.front();
}

std::string Editable::Serialize() const {
  nlohmann::ordered_json header;
  std::string data;
  for (const Entry& entry : entries) {
    header[entry.name] = {{"dtype", entry.dtype},
                          {"shape", entry.shape},
                          {"data_offsets", {data.size(), data.size() + entry.bytes.size()}}};
    data += entry.bytes;
  }
  return SafetensorsFile(header.dump(), data);
}

}  // namespace sparsegdn::model::testing
