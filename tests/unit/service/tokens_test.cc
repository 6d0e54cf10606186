// The token file: grammar, hashes, bounds, and what happens when it changes under the server.
#include "server/service/tokens.h"

#include <gtest/gtest.h>
#include <openssl/sha.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <thread>

#include "tests/unit/service/fake_engine.h"

namespace sparsegdn::service {
namespace {

constexpr char kAlice[] = "alice-0123456789abcdef";
constexpr char kBob[] = "bob+0123456789/ABCDEF=";

std::string HashOf(const std::string& token) {
  unsigned char hash[32];
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash);
  std::string hex = "sha256:";
  for (const unsigned char byte : hash) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", byte);
    hex += two;
  }
  return hex;
}

TEST(TokenTable, PlainAndHashedEntriesMeanTheSame) {
  for (const bool hashed : {false, true}) {
    const std::string text = std::string("# comment\n\n  alice\t ") +
                             (hashed ? HashOf(kAlice) : kAlice) + " \r\nbob " +
                             (hashed ? HashOf(kBob) : kBob);
    const absl::StatusOr<TokenTable> table = TokenTable::Parse(text);
    ASSERT_TRUE(table.ok()) << table.status();
    EXPECT_EQ(table->size(), 2u);
    EXPECT_EQ(table->TenantOf(kAlice), "alice");
    EXPECT_EQ(table->TenantOf(kBob), "bob");
    for (const std::string& wrong :
         {std::string(kAlice) + "x", std::string(kAlice).substr(1), std::string(), HashOf(kAlice),
          std::string(1 << 20, 'a'), std::string("alice")}) {
      EXPECT_FALSE(table->TenantOf(wrong).has_value()) << wrong.substr(0, 80);
    }
  }
}

TEST(TokenTable, ATenantMayHaveSeveralTokens) {
  const auto table = TokenTable::Parse(std::string("t ") + kAlice + "\nt " + kBob + "\n");
  ASSERT_TRUE(table.ok());
  EXPECT_EQ(table->TenantOf(kAlice), "t");
  EXPECT_EQ(table->TenantOf(kBob), "t");
}

TEST(TokenTable, WrongFilesAreRefusedByLineAndNeverQuoted) {
  const std::string secret = "SECRET-secret-SECRET-secret";
  const struct {
    const char* name;
    std::string text, message;
  } rows[] = {
      {"empty", "", "no token"},
      {"comments alone", "# a\n\n", "no token"},
      {"one word", secret, "line 1: one word"},
      {"short", "a 0123456789abcde", "line 1: the token's length"},
      {"long", "a " + std::string(513, 'x'), "line 1: the token's length"},
      {"three words", "a " + secret + " " + secret, "line 1: the token has a character"},
      {"not ASCII", "a \xc3\xa9" + secret, "line 1: the token has a character"},
      {"a NUL", "a " + secret + std::string(1, '\0'), "line 1: the token has a character"},
      {"tenant not printable", "\x01 " + secret, "line 1: the tenant has a character"},
      {"tenant too long", std::string(257, 't') + " " + secret, "line 1: the tenant has more"},
      {"hash too short", "a sha256:abcd", "64 hex digits"},
      {"hash with another letter", "a sha256:" + std::string(64, 'g'), "64 hex digits"},
      {"twice", "a " + secret + "\n#\nb " + secret, "line 3: the token of line 1 again"},
      {"twice, once hashed", "a " + secret + "\nb " + HashOf(secret),
       "line 2: the token of line 1"},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    const absl::StatusOr<TokenTable> table = TokenTable::Parse(row.text);
    ASSERT_TRUE(absl::IsInvalidArgument(table.status())) << table.status();
    EXPECT_NE(table.status().ToString().find(row.message), std::string::npos) << table.status();
    EXPECT_EQ(table.status().ToString().find("ecret"), std::string::npos) << table.status();
  }
  std::string many;
  for (size_t i = 0; i <= kMaxTokens; ++i) many += "t 0123456789abcdef" + std::to_string(i) + "\n";
  EXPECT_TRUE(absl::IsInvalidArgument(TokenTable::Parse(many).status()));
}

class TokenFileTest : public ::testing::Test {
 protected:
  void Write(const std::string& text, mode_t mode = 0600) {
    const std::string temporary = path_ + ".new";
    std::ofstream(temporary) << text;
    ASSERT_EQ(chmod(temporary.c_str(), mode), 0);
    ASSERT_EQ(rename(temporary.c_str(), path_.c_str()), 0);
  }
  void TearDown() override { unlink(path_.c_str()); }
  const std::string path_ = ::testing::TempDir() + "/tokens-" + std::to_string(getpid());
};

TEST_F(TokenFileTest, ARotatedFileIsTakenAndAWrongOneIsNot) {
  Write(std::string("a ") + kAlice);
  auto file = TokenFile::Open(path_, "--auth-tokens", 1);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->table()->TenantOf(kAlice), "a");
  Write(std::string("b ") + kBob);
  EXPECT_TRUE(Eventually([&] { return (*file)->table()->TenantOf(kBob) == "b"; }));
  EXPECT_FALSE((*file)->table()->TenantOf(kAlice).has_value());
  Write("broken");
  EXPECT_TRUE(absl::IsInvalidArgument((*file)->Reload()));
  EXPECT_EQ((*file)->table()->TenantOf(kBob), "b");
  unlink(path_.c_str());
  EXPECT_FALSE((*file)->Reload().ok());
  EXPECT_EQ((*file)->table()->TenantOf(kBob), "b");
  Write(std::string("c ") + kBob);
  EXPECT_TRUE((*file)->Reload().ok());  // at once, as SIGHUP does
  EXPECT_EQ((*file)->table()->TenantOf(kBob), "c");
}

TEST_F(TokenFileTest, AFileThatCannotServeEndsTheStart) {
  for (const auto& [text, message] :
       {std::pair{std::string(), "no token"},
        std::pair{std::string(kMaxTokenFileBytes + 1, '#'), "more than 1048576 bytes"}}) {
    Write(text);
    const auto file = TokenFile::Open(path_, "--auth-tokens", 1);
    ASSERT_TRUE(absl::IsInvalidArgument(file.status())) << file.status();
    EXPECT_NE(file.status().ToString().find("--auth-tokens = " + path_), std::string::npos);
    EXPECT_NE(file.status().ToString().find(message), std::string::npos) << file.status();
  }
  EXPECT_FALSE(TokenFile::Open("/nonexistent/tokens", "--auth-tokens", 1).ok());
}

}  // namespace
}  // namespace sparsegdn::service
